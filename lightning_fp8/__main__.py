"""``python -m lightning_fp8``: the command ``lightning-fp8``, where the package is not installed."""

import sys

from lightning_fp8.cli import main

if __name__ == "__main__":
    sys.exit(main())
