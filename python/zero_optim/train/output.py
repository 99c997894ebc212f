"""Printing that survives a closed pipe, as in ``zero-optim train | head``."""

from __future__ import annotations

import os
import signal
import sys


def say(*lines: str) -> None:
    """Print lines at once. Where the pipe is closed, drop all output from now on and stop the run, as Ctrl-C does."""
    try:
        print(*lines, sep="\n", flush=True)
    except BrokenPipeError:
        print_nowhere()
        signal.raise_signal(signal.SIGINT)


def print_nowhere() -> None:
    """Send stdout to the null device: else the interpreter would complain at exit of what is left in its buffer."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
