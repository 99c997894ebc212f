"""Times `grad_stats` against torch's norm and the memory: `zero-optim bench grad_stats`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "grad_stats", *sys.argv[1:]]))
