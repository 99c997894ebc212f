"""Issues collectives: every call of ``torch.distributed`` that communicates is here and in ``gloo``.

``Comm`` says what is sent and over which group, and keeps account. A *transport* hands it to a back-end. Two differ in
who waits for the result: the host, as under gloo, or the current stream, as under NCCL. Tests, and
``benchmarks/bench_scale.py``, ``use`` others.
"""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renames these two and warns on the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


HOST_PATIENCE = timedelta(hours=2)
"""Time-out of a host group: a rank's disk may be slow. A rank that died is heard of at once."""


class Work(Protocol):
    """A collective under way, as ``torch.distributed`` gives it."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Order what follows after its arrival: the host's work, or that of the current stream."""

    def is_completed(self) -> bool: ...


@dataclass(frozen=True)
class Issued:
    """A collective that was issued. ``on_arrival``: what is left to do with the result, after ``work.wait()``."""

    work: Work
    on_arrival: Callable[[], object] | None = None


@dataclass(frozen=True)
class Reduction:
    """A sum over ranks, of which each keeps its shard.

    Attributes:
        full: [N * shard] the contribution of this rank; its contents are lost.
        own: [shard] this rank's part of ``full``, a view.
        out: [shard] where the sum goes; it may be ``own``.
        accumulate: add to ``out`` instead of overwriting it. Then, and where its dtype is another, ``out`` must not be
            a part of ``full``.
    """

    full: Tensor
    own: Tensor
    out: Tensor
    accumulate: bool


class Transport(Protocol):
    """Hands collectives to a back-end. They arrive in the order in which a group was given them.

    Attributes:
        host_waits: whether ``Work.wait`` holds the host. Else the host goes on, and never asks whether a collective has
            arrived: what a rank launches must not depend on how fast its device is.
    """

    host_waits: bool

    def reduce_scatter(
        self, reduction: Reduction, group: dist.ProcessGroup | None, lend: Callable[[int], Tensor]
    ) -> Issued:
        """Sum over the ranks. ``lend``: lends so many elements of ``full``'s dtype until the sum is there."""

    def all_gather(self, full: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Issued:
        """Fill ``full`` [N * shard] with every rank's ``own`` part of it, in place."""

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None, *, maximum: bool = False) -> Issued:
        """Sum, or maximise, ``tensor`` over the ranks, in place."""

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], received: Tensor, of_each: Sequence[int], group: dist.ProcessGroup
    ) -> Issued:
        """Send ``counts[i]`` elements of ``sent`` to each rank i, and receive ``of_each[i]`` from it, in rank order."""

    def broadcast(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """Copy the ``tensor`` of the group's rank 0, contiguous, to every rank, in place, before what follows."""

    def barrier(self, group: dist.ProcessGroup | None) -> Issued:
        """Issue a collective that arrives when every rank has issued it."""

    def gather_objects(self, value: object, group: dist.ProcessGroup | None) -> list[Any]:
        """Every rank's ``value``, in rank order. The host waits, whatever the back-end."""

    def split(self, group: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Make a new group of this rank's part, with the back-end and time-out of ``group``.

        Collective over the ranks of ``group`` and no others. ``parts``: ranks as the whole job numbers them.
        """

    def host_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A new group of the ranks of ``group`` over gloo. Collective over these alone."""


class TorchTransport:
    """The part of a transport that is the same over every back-end."""

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None, *, maximum: bool = False) -> Issued:
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return Issued(dist.all_reduce(tensor, op=op, group=group, async_op=True))

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], received: Tensor, of_each: Sequence[int], group: dist.ProcessGroup
    ) -> Issued:
        return Issued(dist.all_to_all_single(received, sent, [*of_each], [*counts], group=group, async_op=True))

    def broadcast(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        dist.broadcast(tensor, group_src=0, group=group)

    def gather_objects(self, value: object, group: dist.ProcessGroup | None) -> list[Any]:
        """Do as ``dist.all_gather_object``, which needs NumPy."""
        types = backends(group)
        device = "cpu" if "cpu" in types else next(iter(types))
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
        sizes = _of_every_rank(torch.tensor([pickled.numel()], device=device), group).flatten().tolist()
        padded = pickled.new_zeros(max(sizes))
        padded[: pickled.numel()] = pickled
        rows = _of_every_rank(padded, group).cpu()
        return [pickle.loads(ctypes.string_at(row.data_ptr(), size)) for row, size in zip(rows, sizes, strict=True)]

    def split(self, group: dist.ProcessGroup, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        own = next(list(part) for part in parts if dist.get_rank() in part)
        timeout, backend = _timeout(group), _backend(group)
        if dist.get_world_size(group) == dist.get_world_size():
            made = {tuple(part): dist.new_group(list(part), timeout, backend) for part in parts}
            return made[tuple(own)]
        if self.splits_communicators(group):
            # new_group would split the communicator of all ranks here, and wait for those that are not in ``group``.
            of_group = [[dist.get_group_rank(group, rank) for rank in part] for part in parts]
            split = dist.split_group(parent_pg=group, split_ranks=of_group, timeout=timeout)
            assert split is not None
            return split
        return dist.new_group(own, timeout, backend, use_local_synchronization=True)

    def host_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A new group of the ranks of ``group`` over gloo. Collective over these alone."""
        ranks = dist.get_process_group_ranks(group)
        some = len(ranks) < dist.get_world_size()
        return dist.new_group(ranks, HOST_PATIENCE, "gloo", use_local_synchronization=some)

    def group_of(self, ranks: Sequence[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
        """A new group of ``ranks``, some of the job's, with the back-end and time-out of ``like``. Collective."""
        return dist.new_group(list(ranks), _timeout(like), _backend(like), use_local_synchronization=True)

    def splits_communicators(self, group: dist.ProcessGroup) -> bool:
        """Whether torch makes groups of this kind by ``ncclCommSplit``: after ``init_process_group(device_id=...)``."""
        bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
        return bound and "nccl" in backends(group).values()


class StreamTransport(TorchTransport):
    """NCCL, whose waits hold the current stream."""

    host_waits = False

    def reduce_scatter(
        self, reduction: Reduction, group: dist.ProcessGroup | None, lend: Callable[[int], Tensor]
    ) -> Issued:
        out, own, full = reduction.out, reduction.own, reduction.full
        if not reduction.accumulate and out.dtype == full.dtype:
            return Issued(_reduce_scatter(out, full, group=group, async_op=True))
        work = _reduce_scatter(own, full, group=group, async_op=True)
        return Issued(work, partial(out.add_ if reduction.accumulate else out.copy_, own))

    def all_gather(self, full: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Issued:
        return Issued(_all_gather(full, own, group=group, async_op=True))

    def barrier(self, group: dist.ProcessGroup | None) -> Issued:
        return Issued(dist.barrier(group=group, async_op=True))

    def gather_objects(self, value: object, group: dist.ProcessGroup | None) -> list[Any]:
        with _side_stream():
            return super().gather_objects(value, group)


_side_streams: dict[int, torch.cuda.Stream] = {}  # by device


@contextmanager
def _side_stream() -> Iterator[None]:
    """Launch what the host waits for on a stream of its own, so that it does not wait for what was launched before::

        rank 0   backward: raises at once                   zero_grad: asks how many rounds rank 1 has, then joins them
        rank 1   backward: its stream waits for rank 0      zero_grad: must answer, whatever its stream waits for

    There is one such stream a device, of high priority. torch hands out its other streams in turn, so a new one would
    soon be a stream that waits. With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` the device may still run one after the other.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        yield
        return
    device = torch.cuda.current_device()
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device, priority=-1)
    with torch.cuda.stream(_side_streams[device]):
        yield


STREAMS = StreamTransport()
_used: Transport | None = None


@contextmanager
def use(transport: Transport) -> Iterator[None]:
    """Send everything within over ``transport``, whatever the group's back-end. For tests, and to count messages."""
    global _used
    before, _used = _used, transport
    try:
        yield
    finally:
        _used = before


def used() -> Transport | None:
    """The transport that ``use`` has put in place."""
    return _used


def backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Back-ends by type of device: ``{"cpu": "gloo", "cuda": "nccl"}``."""
    config = dist.get_backend_config(group)
    return dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)


def _of_every_rank(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[N, numel] every rank's ``own`` [numel]."""
    rows = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(rows), own, group=group)
    return rows


def _backend(group: Any) -> str:
    backend: str = dist.get_backend(group)
    if backend in dist.Backend.backend_list and backend != dist.Backend.UNDEFINED:
        return backend
    return dist.get_backend_config(group)  # one for each type of device


def _timeout(group: Any) -> timedelta | None:
    """The group's time-out; None, for the back-end's default, where the group has no options."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)
