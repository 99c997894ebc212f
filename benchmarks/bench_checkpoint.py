"""Saving and loading against the disk, torch.save and DCP on FSDP2: `zero-optim bench checkpoint`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "checkpoint", *sys.argv[1:]]))
