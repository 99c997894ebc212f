"""Times a GPT's training step against the AMP recipe: `zero-optim bench step`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step", *sys.argv[1:]]))
