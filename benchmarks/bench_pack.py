"""Times `pack` against torch's copies and the memory: `zero-optim bench pack`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "pack", *sys.argv[1:]]))
