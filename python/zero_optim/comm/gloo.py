"""Collectives over gloo, made anew where its own are slow. The host waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .storage import references_in_cpp
from .transport import Issued, Reduction, TorchTransport, backends

SUMMED_AT_ONCE = 2**16
"""Elements that a reduce-scatter sums at once: their fp32 sums fit into a core's cache."""

LETS_GO_WITHIN = 1.0
"""Seconds in which gloo's thread lets go of what it has sent. If it takes longer, no more is lost than some memory."""


class GlooTransport(TorchTransport):
    """Gloo: the host waits."""

    host_waits = True

    def reduce_scatter(
        self, reduction: Reduction, group: dist.ProcessGroup | None, lend: Callable[[int], Tensor]
    ) -> Issued:
        """Gloo's reduce-scatter is a clone and an all-reduce; this is a scatter a rank and a local sum.

        One contribution is received where the sum will be, if that memory is free; the own one stays where it is.
        """
        full, own, out = reduction.full, reduction.own, reduction.out
        ranks, this = dist.get_world_size(group), dist.get_rank(group)
        taken = reduction.accumulate or out.dtype != full.dtype or out.data_ptr() == own.data_ptr()
        free = [] if taken else [out]
        lent = ranks - 1 - len(free)
        parts = [*free, *(lend(lent * own.numel()).chunk(lent) if lent else ())]
        send = list(full.chunk(ranks))
        parts.insert(this, send[this])
        works = [
            dist.scatter(part, send if rank == this else None, group_src=rank, group=group, async_op=True)
            for rank, part in enumerate(parts)
        ]
        return Issued(Works(works, send), partial(sum_in_rank_order, parts, out, reduction.accumulate))

    def all_gather(self, full: Tensor, own: Tensor, group: dist.ProcessGroup | None) -> Issued:
        """A broadcast a rank takes half the time of gloo's all-gather."""
        parts = enumerate(full.chunk(dist.get_world_size(group)))
        return Issued(Works([dist.broadcast(part, group_src=rank, group=group, async_op=True) for rank, part in parts]))

    def all_reduce(self, tensor: Tensor, group: dist.ProcessGroup | None, *, maximum: bool = False) -> Issued:
        return Issued(Works([super().all_reduce(tensor, group, maximum=maximum).work]))

    def all_to_all(
        self, sent: Tensor, counts: Sequence[int], received: Tensor, of_each: Sequence[int], group: dist.ProcessGroup
    ) -> Issued:
        return Issued(Works([super().all_to_all(sent, counts, received, of_each, group).work]))

    def barrier(self, group: dist.ProcessGroup | None) -> Issued:
        """Meet on the host. Torch's own barrier would be NCCL's, on the current stream, where the group has NCCL."""
        if group is not None and "nccl" in backends(group).values():
            return self.all_reduce(torch.zeros(1, device="cpu"), group)
        return Issued(Works([dist.barrier(group=group, async_op=True)]))


class Works:
    """Several asynchronous collectives as one. It is complete when all are, or when one is known to have failed.

    The future of a work tells whether it is complete. ``Work.is_completed`` can deadlock: it waits, with the GIL, for a
    lock. The thread that completes the work has that lock, and can itself wait for the GIL: to restore the hooks of
    ``saved_tensors_hooks``, as of a checkpoint that is not re-entrant, while a profiler runs.

    A thread of gloo says that its work is complete before it lets go of the tensors. Until then they look as if the
    user kept them. So ``wait`` ends when gloo refers to none of ``views``, which were made for the collectives alone.
    """

    def __init__(self, works: Sequence[Any], views: Sequence[Tensor] = ()) -> None:
        self._works, self._views = works, views
        self._failed: list[Any] = []

    def is_completed(self) -> bool:
        return bool(self._failed) or all(map(_is_completed, self._works))

    def wait(self, *timeout: timedelta) -> None:
        """Wait for all. Raises what a failed work raises: at once where that is known, else when its turn comes."""
        self._wait_for_all(*timeout)
        self._works = ()
        # Else the next check for tensors that the user keeps would take gloo's own reference for the user's.
        until = time.monotonic() + LETS_GO_WITHIN
        while max(map(references_in_cpp, self._views), default=0) > 1 and time.monotonic() < until:
            time.sleep(0)
        self._views = ()

    def _wait_for_all(self, *timeout: timedelta) -> None:
        try:
            for work in (*self._failed, *self._works):
                work.wait(*timeout)
        except RuntimeError:
            self._failed = [work for work in self._works if _has_failed(work)]  # or one is not there in time
            raise


def _is_completed(work: Any) -> bool:
    done: bool = work.get_future().done()
    return done


def _has_failed(work: Any) -> bool:
    try:
        return _is_completed(work) and not work.wait()
    except RuntimeError:
        return True


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor, accumulate: bool) -> None:
    """Add the ranks' contributions in fp32, in rank order, round once to their dtype, then store or add.

    ``out`` may be one of ``parts``; the first of them may be overwritten.
    """
    if len(parts) == 2 and not accumulate and out.dtype == parts[0].dtype:
        torch.add(parts[0], parts[1], out=out)  # two 16-bit terms are added in fp32, and rounded once
        return
    for of_out, first, *others in zip(*(whole.split(SUMMED_AT_ONCE) for whole in (out, *parts)), strict=True):
        total = first.float()
        for other in others:
            total.add_(other)
        total = total.to(first.dtype)
        of_out.add_(total) if accumulate else of_out.copy_(total)


GLOO = GlooTransport()
