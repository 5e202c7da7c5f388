"""`python -m tandem`, also under torchrun."""

from tandem.cli import main

if __name__ == "__main__":
    main()
