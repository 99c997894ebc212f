"""Times `step()` on many small parameters and on few large ones: `zero-optim bench step_overhead`, with its flags."""

import sys

from zero_optim.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "step_overhead", *sys.argv[1:]]))
