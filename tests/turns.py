"""How processes that share a core take turns on it."""

import contextlib
import os
import sys


def take_turns() -> None:
    """Whoever is woken waits until the one that runs has to wait itself. What this process starts does so, too.

    By default the system lets the one that was woken run at once. Gloo holds a lock while it sends, and what it sends
    wakes another rank, which answers. The sender's own thread that receives then finds the lock taken, and asks again
    and again until its slice of time is over: a third of the processor time of tests with ranks went there (Linux 6.18,
    two to four ranks on a core of an EPYC).
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a sandbox may not have it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
