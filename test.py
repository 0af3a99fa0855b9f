"""The command line's front door: `python test.py 16 32 32 check`. Installed, it is called `factorlayer`."""

from factorlayer.cli.app import main

if __name__ == "__main__":
    main()
