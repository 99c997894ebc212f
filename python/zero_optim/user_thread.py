"""Keeps which thread of the program uses what: each of several threads may train a model of its own.

What a backward that raised has left open is completed by the calls that follow on the same thread. What another thread
has open may be under way there::

    thread 1   backward of A: its round is open      step of A
    thread 2   step of B: leaves A's round alone     backward of B
"""

from __future__ import annotations

import threading

_first: threading.Thread | None = None


def current() -> threading.Thread | None:
    """None on a thread that torch has made: it runs the backward of a GPU, or of many nested checkpoints, for some
    thread of the program."""
    thread = threading.current_thread()
    return None if isinstance(thread, threading._DummyThread) else thread


def is_beside() -> bool:
    """True if this is a thread of the program other than the first one.

    The first one is the thread that has asked before all others. Once it has ended, the next that asks takes its place:
    a thread that has only made the models for the others may end. A thread that torch has made is never beside.
    """
    global _first
    thread = current()
    if _first is None or not _first.is_alive():
        _first = thread
    return thread is not None and thread is not _first


class UserThread:
    """The thread that has last used an optimizer, or a sharded model; at first, the one that has made it."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def note(self) -> None:
        """Note that it is used now."""
        self._thread = current() or self._thread

    def may_complete(self, other: UserThread) -> bool:
        """True if what the user of ``other`` has left open is this one's to complete."""
        return other._thread is self._thread or not other._thread.is_alive()
