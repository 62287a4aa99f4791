"""Runs the command line from a checkout: ``python -m leadline``."""

from leadline.cli import main

if __name__ == "__main__":
    main()
