"""What every launcher starts, once a rank; see the scripts beside it."""

from frugal.engine.run import main

main()
