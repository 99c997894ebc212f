"""Whether the ranks of the tests run on a simulated GPU, and which. ``harness`` asks here.

``SIMULATED_GPU`` is empty, or one of the two simulations and what it says when it is asked whether something has
arrived: ``held:never``, ``held:random``, ``held:always``; ``streams:never`` and so on. ``+bound`` behind it: a device
is bound to the default group, as by ``init_process_group(device_id=...)``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .transport import Entry, SimulatedTransport

VARIABLE = "SIMULATED_GPU"
_RANK = f"{VARIABLE}_RANK"  # in the environment of a rank's process, and of no other
KINDS = ("held", "streams")
ARRIVALS = ("never", "random", "always")


@dataclass(frozen=True)
class Simulation:
    """One of ``KINDS``, and one of ``ARRIVALS``."""

    kind: str
    arrival: str
    device_bound: bool = False

    @staticmethod
    def parse(text: str) -> Simulation:
        """Raises ValueError."""
        rest, plus, bound = text.partition("+")
        kind, _, arrival = rest.partition(":")
        if kind not in KINDS or arrival not in ARRIVALS or (plus and bound != "bound"):
            raise ValueError(
                f"{VARIABLE}={text!r}: expected one of {KINDS}, a colon, one of {ARRIVALS}, perhaps +bound"
            )
        return Simulation(kind, arrival, bool(plus))

    def __str__(self) -> str:
        return f"{self.kind}:{self.arrival}{'+bound' * self.device_bound}"


def chosen() -> Simulation | None:
    """What this process, and those that it starts, simulate."""
    text = os.environ.get(VARIABLE, "")
    return Simulation.parse(text) if text else None


_chosen = chosen()
if _chosen is not None and _chosen.kind == "streams" and _RANK in os.environ:
    from . import device

    device.load()


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
    """A rank's program runs within it. What it issues comes out, in order. Raises Race for the races that were found,
    whether the program has raised or not."""
    issued: list[Entry] = []
    if _chosen is None:
        yield issued
        return
    from zero_optim.comm import transport

    with ExitStack() as stack:
        simulated = _start(_chosen, rank, stack)
        stack.enter_context(transport.use(simulated))
        if simulated.device_bound:
            stack.enter_context(_bound())
        yield issued
        issued += simulated.issued


def _start(simulation: Simulation, rank: int, stack: ExitStack) -> SimulatedTransport:
    if simulation.kind == "held":
        from .held import HeldTransport

        held = HeldTransport(simulation.arrival, seed=rank, device_bound=simulation.device_bound)
        stack.enter_context(held.watching())
        return held
    from .streams import StreamsTransport

    streams = StreamsTransport(simulation.arrival, seed=rank, device_bound=simulation.device_bound)
    stack.enter_context(streams.watching())
    return streams


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
    """As ``pickle.dumps``; tensors on a simulated GPU travel as those of a CPU."""
    import io
    import pickle

    import torch

    class _Pickler(pickle.Pickler):
        def reducer_override(self, thing: Any) -> Any:
            if type(thing) in (torch.Tensor, torch.nn.Parameter) and thing.is_cuda:
                return thing.detach().cpu().__reduce_ex__(2)
            return NotImplemented

    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()


def different_order(by_rank: Sequence[Sequence[Entry]]) -> str:
    """Where two ranks have issued collectives in different orders; empty: nowhere, or nothing is simulated."""
    if not any(by_rank):
        return ""
    from .transport import different_order

    return different_order(by_rank) or ""
