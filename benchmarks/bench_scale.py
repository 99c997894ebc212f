"""What a step costs the host at 8 to 16,384 ranks, on paper: `zero-optim bench scale`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "scale", *sys.argv[1:]]))
