"""Whether the ranks of the tests run on a simulated GPU. ``harness`` imports this module before torch.

``SIMULATED_GPU`` is empty for none, "late" for one, or "late@1" for one that is GPU 1 while GPU 0 is the current
device, as in a program that never calls ``torch.cuda.set_device``.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    import torch

VARIABLE = "SIMULATED_GPU"
LATE, ON_GPU_1 = "late", "late@1"
_LIBRARY = f"{VARIABLE}_LIBRARY"  # the path of the C++ part: in the environment of a rank's process, and of no other
BATCH = 1024
"""Elements that one call updates: some two of the programs' buckets, so that updates and gathers alternate."""


@dataclass(frozen=True)
class Entry:
    """A collective in the order of issue.

    Attributes:
        ranks: of its group, as the whole job numbers them.
        group: torch's name of the group.
        numel: elements that this rank sends; 0 for objects, nothing, or a number that differs by rank.
    """

    ranks: tuple[int, ...]
    group: str
    kind: str
    numel: int


def chosen() -> str:
    """What this process, and those that it starts, simulate. Raises ValueError."""
    name = os.environ.get(VARIABLE, "")
    if name not in ("", LATE, ON_GPU_1):
        raise ValueError(f"{VARIABLE}={name!r}: expected {LATE!r}, {ON_GPU_1!r} or nothing")
    return name


_chosen = chosen()
if _chosen and _LIBRARY in os.environ:
    from . import device

    device.load(os.environ[_LIBRARY])


def require(simulated: str) -> None:
    """Build the device. Where that is impossible the test that calls this is skipped."""
    from .build import Unavailable, library

    try:
        library() if simulated else None
    except Unavailable as missing:
        import pytest

        pytest.skip(str(missing))


@contextmanager
def starting_a_rank(simulated: str) -> Iterator[None]:
    """A process that is started within it is a rank of this simulation. It imports this module before torch."""
    given = {VARIABLE: simulated}
    if simulated:
        from .build import library

        given |= {_LIBRARY: str(library()), "SIMULATED_GPU_NUMBER": "1" if simulated == ON_GPU_1 else "0"}
    with mock.patch.dict(os.environ, given):
        yield


def the_device() -> torch.device:
    """The rank's simulated GPU; the CPU where none is simulated."""
    import torch

    return torch.device("cuda", int(os.environ["SIMULATED_GPU_NUMBER"])) if _chosen else torch.device("cpu")


@contextmanager
def running() -> Iterator[list[Entry]]:
    """A rank's program runs within it. The list holds what it has issued, in order, once this has ended.

    Raises RaceFound where there are races, whether the program has raised or not.
    """
    issued: list[Entry] = []
    if not _chosen:
        yield issued
        return
    from zero_optim.comm import transport
    from zero_optim.step import batches

    from . import device, torch_cuda
    from .transport import LateTransport
    from .watch import watching

    torch_cuda.install()
    torch_cuda.synchronize(torch_cuda.DEVICE)
    device.clear()
    simulated = LateTransport()
    try:
        with mock.patch.object(batches, "ON_A_GPU", BATCH), watching(), transport.use(simulated):
            yield issued
            issued += simulated.issued
        torch_cuda.synchronize(torch_cuda.DEVICE)
    finally:
        if races := device.races():
            raise device.RaceFound("\n".join(races))


def different_order(by_rank: Sequence[Sequence[Entry]]) -> str:
    """Where two ranks issue the collectives that both take part in, in different orders. Empty: nowhere.

    A GPU may run the collectives of all communicators one after another. Two ranks that issue two of them in different
    orders then deadlock.
    """
    for first, second in itertools.combinations(range(len(by_rank)), 2):
        both = [
            [entry for entry in by_rank[rank] if first in entry.ranks and second in entry.ranks]
            for rank in (first, second)
        ]
        for place, (one, other) in enumerate(itertools.zip_longest(*both)):
            if one != other:
                return f"collective {place}: rank {first} issues {one}, rank {second} {other}"
    return ""
