"""The old place of ``zero_optim.figures``."""

from ..figures import *  # noqa: F403
