"""`python -m longstraw`, which torchrun starts as a module."""

from longstraw.cli import main

if __name__ == "__main__":
    main()
