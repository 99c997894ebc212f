"""Stores of state against None, the link, the disk and other packages: `zero-optim bench offload`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "offload", *sys.argv[1:]]))
