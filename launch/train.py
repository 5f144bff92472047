from frugal.training.run import main

main()
