"""``python -m zero_optim`` is ``zero-optim``."""

import sys

from zero_optim_cli import main

if __name__ == "__main__":
    sys.exit(main())
