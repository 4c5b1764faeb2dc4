"""`python -m lockstep` and `torchrun -m lockstep`: the command line."""

from lockstep.scripts.cli import main

if __name__ == "__main__":
    main()
