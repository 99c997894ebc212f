"""NCCL's semantics on CPU tensors: what a collective writes is not there before somebody waits for it.

Between issue and ``wait`` the outputs are NaN. An operator that writes memory which a collective under way uses, or
reads memory which it writes, is a race, and raises at that very place. So is a storage that is resized. Streams are not
simulated: there is one.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .operators import uses
from .transport import Collective, RaceFound, SimulatedTransport, SimulatedWork


class HeldTransport(SimulatedTransport):
    """Every collective is held back until somebody waits for it.

    Attributes:
        races: all that were found, also where a program has caught the exception.
        unwatched: the simulation's own operators run.
    """

    def __init__(self, *, device_bound: bool = False) -> None:
        super().__init__(device_bound=device_bound)
        self.races: list[str] = []
        self.unwatched = False

    def begin(self, collective: Collective, group: str) -> HeldWork:
        return HeldWork(self, collective, group)

    @contextmanager
    def at_memory(self) -> Iterator[None]:
        before, self.unwatched = self.unwatched, True
        try:
            with torch.no_grad():
                yield
        finally:
            self.unwatched = before

    @property
    def under_way(self) -> bool:
        return any(self.queues.values())

    def race(self, text: str) -> None:
        self.races.append(text)
        raise RaceFound(text)

    def touch(self, start: int, end: int, what: str, *, write: bool) -> None:
        """The program reads or writes these addresses."""
        for queue in self.queues.values() if start < end else ():
            for work in queue:
                work.touch(start, end, what, write=write)

    @contextmanager
    def watching(self) -> Iterator[None]:
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, nbytes: int) -> Any:
            if storage.nbytes() and not self.unwatched:
                self.touch(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), "resize_", write=True)
            return resize(storage, nbytes)

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign]
        try:
            with _Watch(self):
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
            if self.races:  # a program may have caught what was raised
                raise RaceFound("\n".join(self.races))


class HeldWork(SimulatedWork):
    """It knows which addresses it uses, and what was there when it was issued."""

    def __init__(self, transport: HeldTransport, collective: Collective, group: str) -> None:
        super().__init__(transport, collective, group)
        self._transport = transport
        self._name = collective.kind
        self._where = "; it was issued at\n" + "".join(traceback.format_stack(limit=9)[:-4])
        tensors = [*((t, False) for t in collective.reads), *((t, True) for t in collective.writes)]
        self._regions = [(*extent(tensor), written) for tensor, written in tensors if tensor.numel()]
        with transport.at_memory():
            self._before = [(tensor, _bits(tensor).clone()) for tensor, _ in tensors]

    def touch(self, start: int, end: int, what: str, *, write: bool) -> None:
        for first, last, written in self._regions:
            if first < end and start < last and (write or written):
                does, has = ("writes" if of else "reads" for of in (write, written))
                self._transport.race(f"{what} {does} what {self._name} {has}, before a wait for it{self._where}")

    def check(self) -> None:
        """What is written past torch is seen here."""
        for tensor, bits in self._before:
            if not torch.equal(_bits(tensor), bits):
                self._transport.race(f"memory of {self._name} was written before a wait for it{self._where}")


class _Watch(TorchDispatchMode):
    """Looks at the arguments of every operator while a collective is under way."""

    def __init__(self, transport: HeldTransport) -> None:
        super().__init__()
        self._transport = transport

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if self._transport.under_way and not self._transport.unwatched:
            for what, tensor, write in uses(func, args, kwargs or {}):
                self._transport.touch(*extent(tensor), what, write=write)
        return func(*args, **(kwargs or {}))


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
