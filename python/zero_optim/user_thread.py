"""The thread of the program that uses an optimizer or a model: several threads may train a model each.

A round that a raised backward has left open is completed by later calls on the same thread::

    thread 1   backward of A: its round is open      step of A
    thread 2   step of B: leaves A's round alone     backward of B
"""

from __future__ import annotations

import threading

_first: threading.Thread | None = None


def current() -> threading.Thread | None:
    """Return this thread; None on one that torch has made, to run a backward for some thread of the program."""
    thread = threading.current_thread()
    return None if isinstance(thread, threading._DummyThread) else thread


def is_beside() -> bool:
    """True if this is a thread of the program other than the first one that has asked."""
    global _first
    thread = current()
    # A thread that has only made the models for the others may end: the next that asks takes its place.
    if _first is None or not _first.is_alive():
        _first = thread
    return thread is not None and thread is not _first


class UserThread:
    """The thread that has last used an optimizer, or a sharded model; at first, the one that has made it."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()

    def note(self) -> None:
        """Record that this thread uses it now."""
        self._thread = current() or self._thread

    def may_complete(self, other: UserThread) -> bool:
        """True if this thread is to complete the rounds and cycles that ``other`` has left open."""
        return other._thread is self._thread or not other._thread.is_alive()
