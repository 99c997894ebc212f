"""The output of a run, whether or not somebody still reads it: of ``zero-optim train | head`` soon nobody does."""

from __future__ import annotations

import os
import signal
import sys


def say(*lines: str) -> None:
    """Print lines at once. Once nobody reads them, the run is asked to stop, as by Ctrl-C, and they go nowhere."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        print_nowhere()
        signal.raise_signal(signal.SIGINT)


def print_nowhere() -> None:
    """Print nowhere from now on: else the interpreter would complain of what is left in the buffer as it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
