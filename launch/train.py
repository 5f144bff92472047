"""What every launcher starts, once a rank. See local.sh, deepspeed.sh and torchrun.sh."""

from frugal.training.run import main

main()
