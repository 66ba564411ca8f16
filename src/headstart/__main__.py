"""`python -m headstart`."""

from headstart.cli import main

if __name__ == "__main__":
    main()
