"""NCCL on the simulated device: a collective runs on a stream of its group's, and ``wait`` holds the current stream.

It is launched after what the current stream had before it. Its result is written when somebody waits for it. A use of
its memory on a stream that has not waited for it is a race, which the device reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode_temporarily

from . import device, ops
from .operators import uses
from .transport import Collective, RaceFound, SimulatedTransport, SimulatedWork


class StreamsTransport(SimulatedTransport):
    """See the module. ``arrival``: what queries of events say, see ``device.set_arrival``."""

    def __init__(self, arrival: str, seed: int, *, device_bound: bool = False) -> None:
        super().__init__(device_bound=device_bound)
        device.install()
        device.clear()
        device.set_arrival(arrival, seed)
        self._streams: dict[str, Any] = {}  # by the name of the group

    def begin(self, collective: Collective, group: str) -> StreamsWork:
        if group not in self._streams:
            self._streams[group] = ops.new_stream()
        return StreamsWork(self, collective, group, self._streams[group])

    @contextmanager
    def at_memory(self) -> Iterator[None]:
        """Outside of the modes of ``watching``, which look at the program's operators. They take a quarter of the
        processor time of all programs here."""
        watched = torch._C._len_torch_dispatch_stack() > 0
        with _pop_mode_temporarily() if watched else nullcontext(), torch._C.DisableTorchFunction():
            yield

    def memory_of(self, tensor: Tensor) -> Tensor:
        """The device does not look at what is done with it."""
        return ops.alias(tensor) if tensor.is_cuda else tensor.detach()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Tensors that the program makes are on the device."""
        try:
            with _OnDevice(), _HostWatch(), _host_copies_told(), _collectives_of_the_program(self):
                yield
            torch.cuda.synchronize()
        finally:
            if races := device.races():  # they come first: what a program raises may follow from them
                raise RaceFound("\n".join(map(str, races)))


class StreamsWork(SimulatedWork):
    """A collective on ``stream``."""

    def __init__(self, transport: StreamsTransport, collective: Collective, group: str, stream: Any) -> None:
        ops.block(ops.record(torch.cuda.current_stream()), stream)
        ops.launch(stream)
        for tensors, write in ((collective.reads, False), (collective.writes, True)):
            for tensor in tensors:
                ops.touch(tensor, write, stream, collective.kind)
        self._done = ops.record(stream)
        super().__init__(transport, collective, group)

    def wait(self, timeout: object = None) -> bool:
        super().wait()
        ops.block(self._done, torch.cuda.current_stream())
        return True


@contextmanager
def _collectives_of_the_program(transport: StreamsTransport) -> Iterator[None]:
    """``dist.all_reduce``, as a program itself calls it. gloo takes no tensor of the device, so it gets the memory."""
    before = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
        if not tensor.is_cuda:
            return before(tensor, *args, **options)
        ops.launch(torch.cuda.current_stream())
        ops.touch(tensor, True, torch.cuda.current_stream(), "all_reduce of the program's")
        return before(transport.memory_of(tensor), *args, **options)

    dist.all_reduce = all_reduce
    try:
        yield
    finally:
        dist.all_reduce = before


_CONSTRUCTORS = _device_constructors()


class _OnDevice(TorchFunctionMode):
    """Tensors that are made without a word about the device are made on the host, and brought to the device.

    So programs written for the CPU run on it, with the same random numbers.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _CONSTRUCTORS:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None or "out" in kwargs:
            return func(*args, **kwargs)
        kwargs.pop("device", None)
        trains = kwargs.pop("requires_grad", False)
        made = func(*args, **kwargs, device=None if func is torch.as_tensor else "cpu")
        return made.to("cuda").requires_grad_(trains) if isinstance(made, Tensor) else made


class _HostWatch(TorchDispatchMode):
    """Tells the device where an operator on the CPU reads or writes pinned memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        used = list(uses(func, args, kwargs or {}))
        if not any(tensor.is_cuda for _, tensor, _ in used):  # the device knows of copies from and to it
            for what, tensor, write in used:
                if tensor.numel() and tensor.is_pinned():
                    device.host_access(tensor, write, what)
        return func(*args, **(kwargs or {}))


@contextmanager
def _host_copies_told() -> Iterator[None]:
    """The library reads a HostCopy past torch, so the device is told of that here."""
    from zero_optim.comm.host_copy import HostCopy

    read = HostCopy.read

    def told(copy: HostCopy, *, wait: bool) -> list[float] | None:
        values = read(copy, wait=wait)
        if values is not None and not copy.immediate:
            device.host_access(copy._host, False, "HostCopy.read")
        return values

    HostCopy.read = told  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostCopy.read = read  # type: ignore[method-assign]
