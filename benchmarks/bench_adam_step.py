"""Times `adam_step` against torch, other fused Adams and the memory: `zero-optim bench adam_step`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "adam_step", *sys.argv[1:]]))
