"""Trains a GPT at every stage and with FSDP2, on 2 and 4 ranks: `zero-optim bench stages`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "stages", *sys.argv[1:]]))
