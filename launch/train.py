"""What every launcher starts, once a rank; see the scripts beside it."""

from frugal.training.run import main

main()
