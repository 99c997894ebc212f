"""Whether the ranks of the tests run on a simulated GPU, and which. ``harness`` asks here.

``SIMULATED_GPU`` is empty, or names a simulation: ``held``, or ``streams:`` and what a query says of work that nobody
has waited for. ``never``: that it is not over; ``always``: that it is; ``random``: either. ``+bound`` behind the name:
a device is bound to the default group, as by ``init_process_group(device_id=...)``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

    from .transport import Entry, SimulatedTransport

VARIABLE = "SIMULATED_GPU"
_RANK = f"{VARIABLE}_RANK"  # in the environment of a rank's process, and of no other
SIMULATIONS = ("streams:never", "streams:random", "streams:always", "held")
BOUND = "+bound"


@dataclass(frozen=True)
class Simulation:
    """``kind``: "held" or "streams". ``arrival``: what follows behind the colon, for "streams"."""

    kind: str
    arrival: str
    device_bound: bool = False

    @staticmethod
    def parse(text: str) -> Simulation:
        """Raises ValueError."""
        name = text.removesuffix(BOUND)
        if name not in SIMULATIONS:
            raise ValueError(f"{VARIABLE}={text!r}: expected one of {SIMULATIONS}, perhaps {BOUND} behind it")
        kind, _, arrival = name.partition(":")
        return Simulation(kind, arrival, text.endswith(BOUND))


def chosen() -> Simulation | None:
    """What this process, and those that it starts, simulate."""
    text = os.environ.get(VARIABLE, "")
    return Simulation.parse(text) if text else None


_chosen = chosen()
if _chosen is not None and _chosen.kind == "streams" and _RANK in os.environ:
    from . import device

    device.load()


BATCH = 1024
"""Elements that one call updates: some two of the programs' buckets, so that updates and gathers take turns."""


@contextmanager
def starting_a_rank(simulated: str) -> Iterator[None]:
    """A process that is started within it is a rank of this simulation. It imports this module before torch."""
    before = os.environ.get(VARIABLE, "")
    os.environ |= {_RANK: "1", VARIABLE: simulated}
    try:
        yield
    finally:
        del os.environ[_RANK]
        os.environ[VARIABLE] = before


@contextmanager
def running(rank: int) -> Iterator[list[Entry]]:
    """A rank's program runs within it. What it issues is in the list once this has ended, in order. Raises RaceFound
    where there were races, whether the program has raised or not."""
    issued: list[Entry] = []
    if _chosen is None:
        yield issued
        return
    from zero_optim.comm import transport
    from zero_optim.step import batches

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(batches, "ON_A_GPU", BATCH))
        simulated = _transport(_chosen, rank)
        stack.enter_context(simulated.watching())
        stack.enter_context(transport.use(simulated))
        if simulated.device_bound:
            stack.enter_context(_bound())
        yield issued
        issued += simulated.issued


def _transport(simulation: Simulation, rank: int) -> SimulatedTransport:
    if simulation.kind == "held":
        from .held import HeldTransport

        return HeldTransport(device_bound=simulation.device_bound)
    from .streams import StreamsTransport

    return StreamsTransport(simulation.arrival, seed=rank, device_bound=simulation.device_bound)


@contextmanager
def _bound() -> Iterator[None]:
    import torch.distributed as dist

    from .transport import new_group_of_a_bound_device, split_group_of_a_bound_device

    before = dist.new_group, dist.split_group
    dist.new_group, dist.split_group = new_group_of_a_bound_device, split_group_of_a_bound_device
    try:
        yield
    finally:
        dist.new_group, dist.split_group = before


def dumps(value: object) -> bytes:
    """As ``pickle.dumps``; tensors on a simulated GPU travel as those of a CPU, and a whole tensor as its bytes: to
    pickle a storage and to load it takes torch 0.2 ms (a Xeon core), and some tests return 50,000 tensors."""
    import io
    import pickle

    import torch

    class _Pickler(pickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.is_cuda:
                thing = thing.detach().cpu()
                return thing.__reduce_ex__(2) if not _travels_as_bytes(thing) else _by_bytes(thing)
            return _by_bytes(thing) if type(thing) is torch.Tensor and _travels_as_bytes(thing) else NotImplemented

    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()


def _travels_as_bytes(tensor: torch.Tensor) -> bool:
    """Plain values, that own all of their storage."""
    return (
        tensor.device.type == "cpu"
        and not tensor.requires_grad
        and not tensor.__dict__
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _by_bytes(tensor: torch.Tensor) -> tuple[Any, ...]:
    return _of_bytes, (ctypes.string_at(tensor.data_ptr(), tensor.nbytes), tensor.dtype, tuple(tensor.shape))


def _of_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)


def different_order(by_rank: Sequence[Sequence[Entry]]) -> str:
    """Where two ranks have issued collectives in different orders; empty: nowhere, or nothing is simulated."""
    if not any(by_rank):
        return ""
    from .transport import different_order

    return different_order(by_rank)
