"""`python -m spmdkit`: the same as `spmdkit`."""

import sys

from spmdkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
