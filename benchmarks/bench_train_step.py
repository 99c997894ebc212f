"""Trains a GPT on two ranks, every stage against its peers: `zero-optim bench train_step`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "train_step", *sys.argv[1:]]))
