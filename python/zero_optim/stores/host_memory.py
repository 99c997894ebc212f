"""Host memory for pages, in a few large slabs that are registered with the GPU as they are made; and copies between it
and the device, beside the work that the device does.

Pinning one small tensor after another takes minutes for a large model, and torch's own pinned memory comes in powers of
two: up to twice what is needed. Pinning in a hook of backward can deadlock with NCCL. So slabs are taken at
construction, as pages are laid out, and kept.

There are two lanes, one for each direction, which last as long as the store: new streams in every step cost memory
(seen elsewhere: gigabytes a step). Marks order lanes and the computing stream among each other::

    lane in      copy page 1 in ── mark a                    wait for b; copy page 3 into page 1's place
    computing                     wait for a; update page 1 ── mark
    lane out                                                   wait; copy page 1 out ── mark b

On a CPU a copy is over when the call returns, and marks do nothing.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.streams import as_own_storage, on_device
from ..errors import OffloadError
from ..params.layout import round_up

ALIGNMENT = 4096  # what direct access to a disk wants, and more than any kernel does
SLAB_BYTES = 256 * 2**20


@dataclass
class _Slab:
    memory: Tensor  # [bytes] uint8
    end: int = 0  # bytes handed out, from the start
    live: int = 0  # runs that were not given back


class HostMemory:
    """Runs of bytes, allocated and freed. A slab is reused when all of it was freed.

    Args:
        pinned: whether a GPU copies from and to it.
        device: that GPU; None: the current one.

    Attributes:
        in_use: bytes that are taken now. The slabs may hold more.
    """

    def __init__(self, *, pinned: bool, device: torch.device | None = None) -> None:
        self._pinned, self._device, self.in_use = pinned, device, 0
        self._slabs: list[_Slab] = []
        self._slab_of: dict[int, _Slab] = {}  # by address of a run

    def take(self, nbytes: int) -> Tensor:
        """[nbytes] uint8, aligned to 4096 bytes, contents undefined. Raises OffloadError where there is no memory.

        The run has a storage of its own, so that a view of it is saved without the rest of the slab.
        """
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        room = round_up(nbytes, ALIGNMENT)
        slab = next((slab for slab in self._slabs if slab.memory.nbytes - slab.end >= room), None)
        if slab is None:
            taken = sum(slab.memory.nbytes for slab in self._slabs)
            slab = _Slab(self._memory(max(room, min(SLAB_BYTES, taken))))
            self._slabs.append(slab)
        run = as_own_storage(slab.memory[slab.end : slab.end + nbytes])
        slab.end += room
        slab.live += 1
        self.in_use += nbytes
        self._slab_of[run.data_ptr()] = slab
        return run

    def give_back(self, run: Tensor) -> None:
        if run.nbytes == 0:
            return
        slab = self._slab_of.pop(run.data_ptr())
        slab.live -= 1
        self.in_use -= run.nbytes
        if slab.live == 0:
            slab.end = 0

    def trim(self) -> None:
        """Give slabs that nothing uses back to the system."""
        self._slabs = [slab for slab in self._slabs if slab.live]

    def _memory(self, nbytes: int) -> Tensor:
        """Allocate [nbytes] uint8, which go back to the system with their last view."""
        try:
            mapping = _Mapping(-1, nbytes)
        except OSError as error:
            raise OffloadError(f"no {nbytes:,} bytes of host memory: {error}") from error
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        if not self._pinned:
            return memory
        # CUDA registers it for all GPUs.
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        with on_device(self._device):
            status = int(runtime.cudaHostRegister(address, nbytes, 0))
        if status != 0:
            # Clear CUDA's last error, by a kernel that raises it: torch asks for it after each launch, so a later
            # kernel of anybody's would raise it.
            with suppress(RuntimeError):
                torch.empty(1, device=self._device or "cuda").add_(1)
            raise OffloadError(
                f"{nbytes:,} bytes of host memory could not be pinned (CUDA error {status}): raise the limit of locked "
                "memory (ulimit -l), or use fewer ranks a machine"
            )
        mapping.on_gpu, mapping.unpin = on_device(self._device), partial(runtime.cudaHostUnregister, address)
        return memory


class _Mapping(mmap.mmap):
    """Anonymous memory, shared with forked processes: their writes to it must not move it away under a GPU's copy."""

    # Made as the memory is pinned: while Python ends, the names of a module may be gone.
    on_gpu: AbstractContextManager[Any]
    unpin: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unpin is not None:  # while the memory is still there
            with self.on_gpu:
                self.unpin()


# -- copies ------------------------------------------------------------------------------------------------------------


class Mark:
    """A moment in the order of launched work. A mark that was never set has passed; on a CPU every mark has."""

    event: torch.cuda.Event | None = None

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        if device is not None and device.type == "cuda":
            self.event = torch.cuda.Event(blocking=True)  # a host that waits sleeps

    def set(self) -> None:
        """Set the mark now, on the current stream."""
        if self.event is not None:
            self.event.record(torch.cuda.current_stream(self._device))

    def order_current(self) -> None:
        """Make the current stream wait for the mark."""
        if self.event is not None:
            self.event.wait(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Block the host until the mark has passed."""
        if self.event is None:
            return
        with on_device(self._device):
            self.event.synchronize()


class Lane:
    """Copies that run one after another. On a CPU, where there is no stream, the caller makes them."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self.stream = stream

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Copy. Others may touch neither tensor until a mark that was set after the copy has passed."""
        with self.as_current():
            target.copy_(source, non_blocking=True)

    def after(self, mark: Mark) -> None:
        """Make later work of this lane wait for the mark."""
        if self.stream is not None and mark.event is not None:
            mark.event.wait(self.stream)

    def set(self, mark: Mark) -> None:
        """Set the mark after all copies of this lane so far."""
        if self.stream is not None and mark.event is not None:
            mark.event.record(self.stream)

    def as_current(self) -> AbstractContextManager[Any]:
        """Make a context in which this lane is the current stream."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)


class Lanes:
    """The two lanes of a device: to it, and from it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]
        self.to_device, self.to_host = map(Lane, streams)

    def mark(self) -> Mark:
        return Mark(self._device)

    def keep(self, memory: Tensor) -> None:
        """Call before dropping memory of the device: it is reused only after what the lanes do with it now."""
        for lane in (self.to_device, self.to_host):
            if lane.stream is not None:
                memory.record_stream(lane.stream)
