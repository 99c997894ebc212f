"""Memory of a rank along a training, by stage: `zero-optim bench memory_walkthrough`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "memory_walkthrough", *sys.argv[1:]]))
