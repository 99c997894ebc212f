"""Counts what a process has along 100 000 steps: `zero-optim bench endurance`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "endurance", *sys.argv[1:]]))
