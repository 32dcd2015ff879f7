"""``python -m thalweg``: the same as the console script, for torchrun and for environments without it."""

import sys

from thalweg.cli import main

if __name__ == "__main__":
    sys.exit(main())
