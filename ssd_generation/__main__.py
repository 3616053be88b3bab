"""`python -m ssd_generation`: the command line without the `ssd` script."""

from .cli import main

if __name__ == "__main__":
    main()
