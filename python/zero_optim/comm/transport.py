"""Issues collectives: every call of ``torch.distributed`` that communicates is here.

``Comm`` chooses what is sent and over which group, and keeps account. A *transport* hands it to a back-end. The two
differ in what waits for the result: the host, as under gloo, or the current stream, as under NCCL. Tests, and
``benchmarks/bench_scale.py``, ``use`` others.
"""

from __future__ import annotations

import ctypes
import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .handle import Handle
from .streams import references_in_cpp

# torch 2.13 renames these two and warns on the old names.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


HOST_PATIENCE = timedelta(hours=2)
"""Time-out of a host group: a rank's disk may be slow. A rank that died is heard of at once."""


@dataclass(frozen=True)
class Reduction:
    """A sum over ranks, of which each keeps its shard.

    Attributes:
        full: [N * shard] the contribution of this rank. Its contents are lost where ``accumulate``, or where the dtype
            of ``out`` is another.
        own: [shard] this rank's part of ``full``, a view.
        out: [shard] where the sum goes; it may be ``own``.
        accumulate: add to ``out`` instead of overwriting it. Then, and where its dtype is another, ``out`` must not be
            a part of ``full``.
        scale: the sum is multiplied by it, a power of two; 1 where the dtype of ``out`` is another.
    """

    full: Tensor
    own: Tensor
    out: Tensor
    accumulate: bool
    scale: float = 1.0

    def received(self) -> Tensor:
        """[shard] where the sum is received."""
        return self.own if self.accumulate or self.out.dtype != self.full.dtype else self.out

    def on_arrival(self) -> Callable[[], object] | None:
        """Return what stores the sum that was received; None: nothing has to be done."""
        if self.accumulate:
            return partial(self.out.add_, self.own, alpha=self.scale)
        if self.out.dtype != self.full.dtype:
            return partial(self.out.copy_, self.own)
        return None if self.scale == 1 else partial(self.out.mul_, self.scale)


SUMMED_AT_ONCE = 2**16
"""Elements that a reduce-scatter sums at once: their fp32 sums fit into a core's cache."""

LETS_GO_WITHIN = 1.0
"""Seconds in which gloo's thread lets go of what it has sent. If it takes longer, no more is lost than some memory."""


class Transport:
    """Hands collectives to NCCL, whose waits hold the current stream. They arrive in the order in which a group was
    given them.

    Attributes:
        host_waits: whether ``Work.wait`` holds the host. Else the host goes on, and never asks whether a collective has
            arrived: what a rank launches must not depend on how fast its device is.
    """

    host_waits = False

    def reduce_scatter(
        self, reduction: Reduction, group: dist.ProcessGroup | None, lend: Callable[[int], Tensor]
    ) -> Handle:
        """Sum over the ranks. ``lend``: lends so many elements of ``full``'s dtype until the sum is there."""
        work = _reduce_scatter(reduction.received(), reduction.full, group=group, async_op=True)
        return Handle(work, reduction.on_arrival())

    def all_gather(self, full: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Handle:
        """Fill ``full`` [N * shard] with every rank's ``own`` [shard], which is its part of ``full``, or elsewhere."""
        return Handle(_all_gather(full, own, group=group, async_op=True))

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None, *, maximum: bool = False) -> Handle:
        """Sum, or maximise, ``tensor`` over the ranks, in place."""
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        return self._handle(dist.all_reduce(tensor, op=op, group=group, async_op=True))

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], received: Tensor, of_each: Sequence[int], group: dist.ProcessGroup
    ) -> Handle:
        """Send ``counts[i]`` elements of ``sent`` to each rank i, and receive ``of_each[i]`` from it, in rank order."""
        return self._handle(dist.all_to_all_single(received, sent, [*of_each], [*counts], group=group, async_op=True))

    def broadcast(self, tensor: Tensor, group: dist.ProcessGroup | None) -> None:
        """Copy the ``tensor`` of the group's rank 0, contiguous, to every rank, in place, before what follows."""
        dist.broadcast(tensor, group_src=0, group=group)

    def barrier(self, group: dist.ProcessGroup | None) -> Handle:
        """Issue a collective that arrives when every rank has issued it."""
        return self._handle(dist.barrier(group=group, async_op=True))

    def gather_objects(self, value: object, group: dist.ProcessGroup | None) -> list[Any]:
        """Every rank's ``value``, in rank order. The host waits, whatever the back-end."""
        types = backends(group)
        device = "cpu" if "cpu" in types else next(iter(types))
        with _side_stream() if device != "cpu" else nullcontext():
            # ``dist.all_gather_object`` needs NumPy, which torch does not bring.
            pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)
            sizes = _of_every_rank(torch.tensor([pickled.numel()], device=device), group).flatten().tolist()
            padded = pickled.new_zeros(max(sizes))
            padded[: pickled.numel()] = pickled
            rows = _of_every_rank(padded, group).cpu()
        return [pickle.loads(ctypes.string_at(row.data_ptr(), size)) for row, size in zip(rows, sizes, strict=True)]

    def split(self, group: dist.ProcessGroup, parts: Sequence[Sequence[int]], purpose: str) -> dist.ProcessGroup:
        """Make a new group of this rank's part, like ``group``: see ``new_group_of``.

        Collective over the ranks of ``group`` and no others. ``parts``: ranks as the whole job numbers them.
        """
        own = next(tuple(part) for part in parts if dist.get_rank() in part)
        if dist.get_world_size(group) < dist.get_world_size():
            return new_group_of(own, group, purpose)
        return {tuple(part): new_group_of(part, group, purpose, by_all=True) for part in parts}[own]

    def host_group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """A new group of the ranks of ``group`` over gloo. Collective over these alone."""
        ranks = dist.get_process_group_ranks(group)
        some = len(ranks) < dist.get_world_size()
        return dist.new_group(
            ranks, HOST_PATIENCE, "gloo", use_local_synchronization=some, group_desc="zero_optim:host"
        )

    def _handle(self, work: Any) -> Handle:
        return Handle(work)


_side_streams: dict[int, torch.cuda.Stream] = {}  # by device


@contextmanager
def _side_stream() -> Iterator[None]:
    """Launch what the host waits for on a stream of its own, so that it does not wait for what was launched before::

        rank 0   backward: raises at once                   zero_grad: asks how many rounds rank 1 has, then joins them
        rank 1   backward: its stream waits for rank 0      zero_grad: must answer, whatever its stream waits for

    With ``CUDA_DEVICE_MAX_CONNECTIONS=1`` the device may still run one after the other.
    """
    device = torch.cuda.current_device()
    if device not in _side_streams:
        # Of high priority, and kept: torch hands out its other streams in turn, so a new one would soon be a stream
        # that waits for a collective.
        _side_streams[device] = torch.cuda.Stream(device, priority=-1)
    with torch.cuda.stream(_side_streams[device]):
        yield


class GlooTransport(Transport):
    """Gloo: the host waits."""

    host_waits = True

    def reduce_scatter(
        self, reduction: Reduction, group: dist.ProcessGroup | None, lend: Callable[[int], Tensor]
    ) -> Handle:
        """Gloo's reduce-scatter is a clone and an all-reduce; this is a scatter a rank and a local sum."""
        full, own, out = reduction.full, reduction.own, reduction.out
        ranks, this = dist.get_world_size(group), dist.get_rank(group)
        taken = reduction.accumulate or out.dtype != full.dtype or out.data_ptr() == own.data_ptr()
        # One contribution is received where the sum will be, if that memory is free; the own one stays where it is.
        free = [] if taken else [out]
        lent = ranks - 1 - len(free)
        parts = [*free, *(lend(lent * own.numel()).chunk(lent) if lent else ())]
        send = list(full.chunk(ranks))
        parts.insert(this, send[this])
        works = [
            dist.scatter(part, send if rank == this else None, group_src=rank, group=group, async_op=True)
            for rank, part in enumerate(parts)
        ]
        return Handle(Works(works, send), partial(sum_in_rank_order, parts, out, reduction.accumulate, reduction.scale))

    def all_gather(self, full: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Handle:
        """A broadcast a rank takes half the time of gloo's all-gather."""
        parts = full.chunk(dist.get_world_size(group))
        if (place := parts[dist.get_rank(group)]).data_ptr() != own.data_ptr():
            place.copy_(own)  # a broadcast sends from where the others receive
        works = [dist.broadcast(part, group_src=rank, group=group, async_op=True) for rank, part in enumerate(parts)]
        return Handle(Works(works))

    def barrier(self, group: dist.ProcessGroup | None) -> Handle:
        """Meet on the host. Torch's own barrier would be NCCL's, on the current stream, where the group has NCCL."""
        if group is not None and "nccl" in backends(group).values():
            return self.all_reduce(torch.zeros(1, device="cpu"), group)
        return super().barrier(group)

    def _handle(self, work: Any) -> Handle:
        return Handle(Works([work]))


class Works:
    """Several asynchronous collectives as one. It is complete when all are, or when one is known to have failed.

    ``views``: of what they send, made for them alone.
    """

    def __init__(self, works: Sequence[Any], views: Sequence[Tensor] = ()) -> None:
        self._works, self._views = works, views
        self._failed: list[Any] = []

    def is_completed(self) -> bool:
        return bool(self._failed) or all(map(_is_completed, self._works))

    def wait(self, *timeout: timedelta) -> None:
        """Wait for all. Raises what a failed work raises: at once where that is known, else when its turn comes."""
        try:
            for work in (*self._failed, *self._works):
                work.wait(*timeout)
        except RuntimeError:
            self._failed = [work for work in self._works if _has_failed(work)]  # or one is not there in time
            raise
        # The loop's variable is a reference, too: to the last work, which has the tensors that it sent.
        self._works, work = (), None
        # A thread of gloo marks its work complete before it frees the tensors (1 ms before, where it loses its core in
        # between). Until then the next check for tensors that the user keeps takes gloo's reference for the user's.
        until = time.monotonic() + LETS_GO_WITHIN
        while max(map(references_in_cpp, self._views), default=0) > 1 and time.monotonic() < until:
            time.sleep(0)
        self._views = ()


def _is_completed(work: Any) -> bool:
    # ``Work.is_completed`` can deadlock: it waits, with the GIL, for a lock. The thread that completes the work has
    # that lock, and can itself wait for the GIL: to restore the hooks of ``saved_tensors_hooks``, as of a checkpoint
    # that is not re-entrant, while a profiler runs.
    done: bool = work.get_future().done()
    return done


def _has_failed(work: Any) -> bool:
    try:
        return _is_completed(work) and not work.wait()
    except RuntimeError:
        return True


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor, accumulate: bool, scale: float = 1.0) -> None:
    """Add the ranks' contributions in fp32, in rank order, times ``scale``, round once to their dtype, then store or
    add.

    ``out`` may be one of ``parts``; the first of them may be overwritten where ``scale`` is 1.
    """
    if len(parts) == 2 and not accumulate and out.dtype == parts[0].dtype:
        torch.add(parts[0], parts[1], out=out)  # two 16-bit terms are added in fp32, and rounded once
        if scale != 1:
            out.mul_(scale)  # a power of two: nothing is rounded
        return
    for of_out, first, second, *others in zip(*(whole.split(SUMMED_AT_ONCE) for whole in (out, *parts)), strict=True):
        total = first.float().add_(second) if scale == 1 else (first.float() + second)
        for other in others:
            total.add_(other)
        total = (total if scale == 1 else total.mul_(scale)).to(first.dtype)
        of_out.add_(total) if accumulate else of_out.copy_(total)


STREAMS = Transport()
GLOO = GlooTransport()
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
    return dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(",") if ":" in pair)


def new_group_of(
    ranks: Sequence[int], like: dist.ProcessGroup, purpose: str, *, by_all: bool = False
) -> dist.ProcessGroup:
    """Collective over ``ranks``, or ``by_all`` ranks of the job. Make a group with the back-end and time-out of
    ``like``. ``purpose``: for its description, which NCCL's flight recorder dumps."""
    timeout, backend = _options_of(like)
    options: Any = None
    if "nccl" in backends(like).values():
        # Else a collective's blocks queue behind those of the kernels that the backward has launched before it.
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout  # torch warns where its two time-outs differ
    world: Any = dist.group.WORLD
    bound = world.bound_device_id
    if not by_all:
        # After ``init_process_group(device_id=...)`` torch makes a group by splitting the communicator of all ranks of
        # the job, which waits for those that are not in ``ranks``. Of an unbound one it splits nothing.
        world.bound_device_id = None
    try:
        return dist.new_group(
            [*ranks],
            timeout,
            backend,
            options,
            use_local_synchronization=not by_all,
            group_desc=f"zero_optim:{purpose}",
        )
    finally:
        world.bound_device_id = bound


def _of_every_rank(own: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[N, numel] every rank's ``own`` [numel]."""
    rows = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(rows), own, group=group)
    return rows


def _options_of(group: Any) -> tuple[timedelta | None, str]:
    """The group's time-out and back-end. None, for the back-end's default time-out, where the group has no options."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    backend: str = dist.get_backend(group)
    if backend not in dist.Backend.backend_list or backend == dist.Backend.UNDEFINED:
        backend = dist.get_backend_config(group)  # one for each type of device
    return getattr(options, "_timeout", None), backend
