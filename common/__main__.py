"""`python -m boundedkv`."""

import sys

from boundedkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
