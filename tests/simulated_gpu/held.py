"""NCCL's semantics on CPU tensors: what a collective writes is not there before somebody waits for it.

Between issue and ``wait`` the outputs are NaN. An operator that reads or writes memory of a collective under way, or a
storage that is resized, is a race, and raises at that very place. Streams are not simulated: there is one.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .transport import Collective, SimulatedTransport

# What looks at a tensor's description, and not at its values.
_DESCRIBES = {"_has_compatible_shallow_copy_type", "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty"}
_DESCRIBES |= {"new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like", "set_"}
_DESCRIBES |= {"zeros_like"}


class Race(AssertionError):
    """Memory of a collective under way was touched."""


class HeldTransport(SimulatedTransport):
    """Every collective is held back until somebody waits for it.

    Attributes:
        arrival: what ``is_completed`` says: "never" (the device is far behind), "always", or "random".
        races: all that were found, also where a program has caught the exception.
    """

    def __init__(self, arrival: str, seed: int, *, device_bound: bool = False) -> None:
        super().__init__(device_bound=device_bound)
        self.arrival, self._random = arrival, random.Random(seed)
        self.races: list[str] = []
        self.flights: list[HeldWork] = []
        self.own = False  # the simulation's own operators run

    def begin(self, collective: Collective) -> HeldWork:
        work = HeldWork(self, collective)
        self.flights.append(work)
        return work

    def deliver_until(self, last: HeldWork) -> None:
        """Collectives of one group arrive in order."""
        for work in [flight for flight in self.flights if flight.collective.group is last.collective.group]:
            if not last.delivered:
                work.deliver()

    def says_completed(self) -> bool:
        return self.arrival == "always" or (self.arrival == "random" and self._random.random() < 0.5)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The simulation itself touches memory."""
        before, self.own = self.own, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.own = before

    def race(self, text: str) -> None:
        self.races.append(text)
        raise Race(text)

    def touch(self, start: int, end: int, what: str, *, write: bool) -> None:
        """An operator reads or writes these addresses."""
        for flight in self.flights if start < end else ():
            flight.touch(start, end, what, write=write)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Whatever touches memory within it is looked at."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, nbytes: int) -> Any:
            if storage.nbytes() and not self.own:
                self.touch(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), "resize_", write=True)
            return resize(storage, nbytes)

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign]
        try:
            with _Watch(self):
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            if self.races:  # a program may have caught what was raised
                raise Race("\n".join(self.races))


class HeldWork:
    """A collective of which the result is held back."""

    def __init__(self, transport: HeldTransport, collective: Collective) -> None:
        self.collective, self._transport, self.delivered = collective, transport, False
        self._name = collective.kind
        self._where = "; it was issued at\n" + "".join(traceback.format_stack(limit=9)[:-4])
        with transport.at_work():
            sent = collective.sent.detach().clone()
            self._parts = [torch.empty_like(sent) for _ in range(dist.get_world_size(collective.group))]
            self._gloo: Any = dist.all_gather(self._parts, sent, group=collective.group, async_op=True)
            for tensor in collective.writes:
                tensor.detach().fill_(torch.nan if tensor.is_floating_point() else 0x55)
            tensors = [*((t, False) for t in collective.reads), *((t, True) for t in collective.writes)]
            self._regions = [(*extent(tensor), written) for tensor, written in tensors if tensor.numel()]
            self._before = [(tensor, _bits(tensor).clone()) for tensor, _ in tensors]

    def touch(self, start: int, end: int, what: str, *, write: bool) -> None:
        for first, last, written in self._regions:
            if first < end and start < last and (write or written):
                does, has = ("writes" if of else "reads" for of in (write, written))
                self._transport.race(f"{what} {does} what {self._name} {has}, before a wait for it{self._where}")

    def deliver(self) -> None:
        self._gloo.wait()
        self.delivered = True
        self._transport.flights.remove(self)
        with self._transport.at_work():
            for tensor, bits in self._before:
                if not torch.equal(_bits(tensor), bits):
                    self._transport.race(f"memory of {self._name} was written before a wait for it{self._where}")
            for tensor, value in self.collective.finish(self._parts):
                tensor.detach().copy_(value)

    def wait(self, timeout: object = None) -> bool:
        if not self.delivered:
            self._transport.deliver_until(self)
        return True

    def is_completed(self) -> bool:
        if not self.delivered and self._transport.says_completed():
            self._transport.deliver_until(self)
        return self.delivered


class _Watch(TorchDispatchMode):
    """Looks at the arguments of every operator while a collective is under way."""

    def __init__(self, transport: HeldTransport) -> None:
        super().__init__()
        self._transport = transport

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._transport.flights and not self._transport.own:
            look(func, args, kwargs or {}, self._transport.touch)
        return func(*args, **(kwargs or {}))


def look(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], touch: Callable[..., None]) -> None:
    """Tell ``touch`` of every plain tensor that the operator reads or writes."""
    schema = func._schema
    mutates = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    views = not mutates and any(result.alias_info is not None for result in schema.returns)
    if views or schema.name.split("::")[1] in _DESCRIBES:
        return
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    for argument in schema.arguments:
        write = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(given.get(argument.name)):
            plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter)
            if plain and tensor.layout is torch.strided:
                touch(*extent(tensor), f"{schema.name}({argument.name})", write=write)


def extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses that it covers."""
    storage = tensor.untyped_storage()
    if tensor.numel() == 0 or storage.nbytes() == 0:
        return 0, 0
    start = storage.data_ptr() + tensor.storage_offset() * tensor.element_size()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
