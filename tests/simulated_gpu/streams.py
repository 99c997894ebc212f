"""NCCL on the simulated device: a collective runs on a stream of its group's, and ``wait`` holds the current stream.

It is launched after what the current stream had before it. Its result is written when somebody waits for it. Whoever
touches its memory in between, without that wait before it on its own stream, is a race that the device reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from . import device, ops
from .transport import Collective, SimulatedTransport


class Races(AssertionError):
    """What the device has seen in a rank's program."""


class StreamsTransport(SimulatedTransport):
    """See the module. ``arrival``: what queries of events and collectives say, see ``device.set_arrival``."""

    def __init__(self, arrival: str, seed: int, *, device_bound: bool = False) -> None:
        super().__init__(device_bound=device_bound)
        device.install()
        device.clear()
        device.set_arrival(arrival, seed)
        self._streams: dict[str, Any] = {}
        self._flights: dict[str, list[StreamsWork]] = {}

    def begin(self, collective: Collective) -> StreamsWork:
        name = (collective.group or dist.group.WORLD).group_name  # type: ignore[union-attr]
        if name not in self._streams:
            self._streams[name] = ops.new_stream()
        flights = self._flights.setdefault(name, [])
        work = StreamsWork(collective, self._streams[name], flights)
        flights.append(work)
        return work

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tensors that the program makes are on the device. Raises Races at the end."""
        try:
            with _OnDevice(), _collectives_of_the_program():
                yield
            torch.cuda.synchronize()
        finally:
            if races := device.races():  # they come first: what a program raises may follow from them
                raise Races("\n".join(map(str, races)))


class StreamsWork:
    """A collective on ``stream``. ``flights``: those of its group that have not been waited for, in order."""

    def __init__(self, collective: Collective, stream: Any, flights: list[StreamsWork]) -> None:
        self._collective, self._flights = collective, flights
        ops.block(ops.record(torch.cuda.current_stream()), stream)
        ops.launch(stream)
        for tensors, write in ((collective.reads, False), (collective.writes, True)):
            for tensor in tensors:
                ops.touch(tensor, write, stream, collective.kind)
        self._done = ops.record(stream)
        sent = _on_host(collective.sent).clone()
        self._parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(collective.group))]
        self._gloo: Any = dist.all_gather(self._parts, sent, group=collective.group, async_op=True)
        for tensor in collective.writes:
            _on_host(tensor).fill_(torch.nan if tensor.is_floating_point() else 0x55)

    def wait(self, timeout: object = None) -> bool:
        while self in self._flights:
            self._flights.pop(0)._deliver()
        ops.block(self._done, torch.cuda.current_stream())
        return True

    def _deliver(self) -> None:
        """The tensors are held until here, as torch holds those of NCCL's."""
        self._gloo.wait()
        for tensor, value in self._collective.finish(self._parts):
            _on_host(tensor).copy_(value)
        del self._collective, self._parts, self._gloo

    def is_completed(self) -> bool:
        return self._done.query()


def _on_host(tensor: Tensor) -> Tensor:
    """Its memory, which the device does not look at."""
    return ops.alias(tensor) if tensor.is_cuda else tensor.detach()


@contextmanager
def _collectives_of_the_program() -> Iterator[None]:
    """``dist.all_reduce`` of a program itself: gloo has no device."""
    before = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if not tensor.is_cuda:
            return before(tensor, *args, **options)
        ops.launch(torch.cuda.current_stream())
        ops.touch(tensor, True, torch.cuda.current_stream(), "all_reduce of the program's")
        return before(_on_host(tensor), *args, **options)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = before


class _OnDevice(TorchFunctionMode):
    """Tensors that are made without a word about the device are made on the host, and brought to the device.

    So programs written for the CPU run on it, with the same random numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func not in _device_constructors() or kwargs.get("device") is not None or "out" in kwargs:
            return func(*args, **kwargs)
        kwargs.pop("device", None)
        trains = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs, device=None if func is torch.as_tensor else "cpu")
        return made.to("cuda").requires_grad_(trains) if isinstance(made, Tensor) else made
