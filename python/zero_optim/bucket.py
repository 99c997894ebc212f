"""A bucket: the flat storages behind a run of parameters, and the life of their gradients.

EMPTY ── collect ──> LOCAL ── launch ──┐
  └────────────── launch ──────────────┴──> REDUCED ── launch (adds) ──> REDUCED
"""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import zero_kernels  # noqa: F401  registers torch.ops.zero_kernels

from .comm import Comm, Pending
from .comm_buffers import CommBuffers
from .errors import GradientError
from .flat_params import FlatParams
from .flat_shard import FlatShard
from .handed_out import HandedOut
from .layout import BucketLayout
from .storage import allocate, deallocate

_grad_of = operator.attrgetter("grad")
_kind_of = operator.attrgetter("dtype", "layout", "device", "requires_grad")


class GradState(enum.Enum):
    """Where a bucket's gradients are in memory."""

    EMPTY = enum.auto()  # nowhere, or in each ``parameter.grad`` that autograd allocated
    LOCAL = enum.auto()  # grad_buffer holds this rank's own sums in full; every ``.grad`` is a view of it
    REDUCED = enum.auto()  # grad_shard holds the average over ranks, or will when ``pending`` arrives


@dataclass(frozen=True)
class Sharding:
    """What is split over which ranks. A stage is a comparison: 0 nothing, >= 1 optimizer state, >= 2 gradients, >= 3
    parameters."""

    comm: Comm
    stage: int
    grad_reduce_dtype: torch.dtype | None
    device: torch.device

    @property
    def shards(self) -> int:
        return self.comm.world_size if self.stage >= 1 else 1

    @property
    def shard(self) -> int:
        return self.comm.rank if self.stage >= 1 else 0

    @property
    def reduces(self) -> bool:
        return self.comm.world_size > 1

    def reduce_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of ``dtype`` parameters are communicated. Alone, a rank widens nothing."""
        return self.grad_reduce_dtype or dtype if self.reduces else dtype


@dataclass(frozen=True)
class Settled:
    """What has happened to a bucket's gradients since their last reduction."""

    unreduced: list[int]  # parameters whose gradients came after it
    dropped: bool  # some were zeroed by the user


class Bucket:
    """The flat parameters of one dtype that are reduced together, and the buffers of their gradients.

    Attributes:
        flat: the parameters; at stage 3 those of a unit.
        param_shard: [shard_numel] this rank's part of them.
        keeps_full: whether gradients rest here in full: at stages 0 and 1, and on one rank.
        grad_buffer: where gradients rest, [numel] where ``keeps_full``, else [shard_numel].
        grad_shard: [shard_numel] what ``step`` applies, a view of ``grad_buffer``.
        offsets: where each slot starts, in elements.
        nonfinite: [slots] int32, 1 where the gradient that this rank last packed was not finite. Given by the reducer.
        gather: brings in the other ranks' parts of the parameters after a step, while it is under way.
        used: one byte a slot, 1 where this rank has put a gradient of it into ``grad_buffer``.
    """

    def __init__(self, layout: BucketLayout, flat: FlatParams, labels: Sequence[str], sharding: Sharding) -> None:
        self.layout, self.flat, self.sharding = layout, flat, sharding
        self.params = flat.params
        self._labels = labels
        self.dtype, self.device = flat.dtype, flat.device
        self.reduce_dtype = sharding.reduce_dtype(self.dtype)
        self.pieces = tuple(layout.pieces(sharding.shard))
        self.offsets = [slot.offset for slot in layout.slots]
        self.nonfinite = torch.zeros(len(self.params), dtype=torch.int32, device=self.device)
        self._absent = torch.empty(0, dtype=self.dtype, device=self.device)  # what pack is given for no gradient
        self._buffers: CommBuffers | None = None  # lent to the reduction that is pending
        self.pending: Pending | None = None
        self.gather: Pending | None = None
        self.state = GradState.EMPTY
        self.used = bytearray(len(self.params))
        self._taken: set[int] = set()  # slots whose reduced gradient was taken out of .grad, to be added to
        self.refused: dict[int, str] = {}  # by slot, why its gradient was left out
        self._stale: set[int] = set()  # slots zeroed by the user since their gradients came into the bucket
        self._allocate_gradients()

    @property
    def param_shard(self) -> Tensor:
        return self.flat.shard

    def _allocate_gradients(self) -> None:
        stage, reduces = self.sharding.stage, self.sharding.reduces
        self.keeps_full = stage <= 1 or not reduces
        numel = self.layout.numel if self.keeps_full else self.layout.shard_numel
        dtype = self.dtype if stage == 0 else self.reduce_dtype  # at stage 0 `.grad` shows what is applied
        self.grad_buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        self.grad_shard = self._own_part(self.grad_buffer) if self.keeps_full else self.grad_buffer
        self._views: Sequence[Tensor] = ()
        if self.keeps_full and dtype == self.dtype:
            self._views = self._slot_views(self.grad_buffer)
        self._shards: Sequence[FlatShard] = ()
        if stage >= 1 and reduces:
            self._shards = self.shard_views(self.grad_shard, "gradient", self.dtype)
        for shard in self._shards:  # a strong reference back would keep buckets in memory that were laid out anew
            shard.before_write = partial(_call, weakref.WeakMethod(self.wait))
        held = [shard.local for shard in self._shards] if self.flat.sharded else []
        handed_out = ((self._views, ()), (self._shards, held))
        self._handed_out = [HandedOut(self.grad_buffer, handles, of_them) for handles, of_them in handed_out]
        if self.flat.sharded:
            deallocate(self.grad_buffer)

    def _leave_what_is_kept(self) -> None:
        """Before all gradients here are lost: where the user keeps one of before, new ones go elsewhere."""
        if any(handed_out.kept(self.params) for handed_out in self._handed_out):
            self._allocate_gradients()

    def label(self, index: int) -> str:
        return self._labels[self.layout.slots[index].param]

    def relabel(self) -> None:
        for index, shard in enumerate(self._shards):
            shard.label = f"gradient of {self.label(index)}"

    def _own_part(self, full: Tensor) -> Tensor:
        return full.narrow(0, self.sharding.shard * self.layout.shard_numel, self.layout.shard_numel)

    def _slot_views(self, full: Tensor) -> list[Tensor]:
        slots = zip(self.layout.slots, self.params, strict=True)
        return [full.narrow(0, slot.offset, slot.numel).view(parameter.shape) for slot, parameter in slots]

    def shard_views(self, shard: Tensor, what: str, dtype: torch.dtype | None = None) -> list[FlatShard]:
        """A shard a slot over ``shard`` [shard_numel], in the parameters' shapes. ``dtype``: None is the shard's."""
        return [
            FlatShard(
                shard.narrow(0, piece.in_shard, piece.numel),
                piece.in_param,
                parameter.shape,
                f"{what} of {self.label(index)}",
                dtype,
            )
            for index, (piece, parameter) in enumerate(zip(self.pieces, self.params, strict=True))
        ]

    def let_go(self) -> None:
        """Hold no parameters and no gradients any more: memory goes as the parameters move to other buckets."""
        del self.flat, self.params
        del self.grad_buffer, self.grad_shard, self._views, self._shards, self._handed_out

    # -- gradients -----------------------------------------------------------------------------------------------

    @property
    def can_collect(self) -> bool:
        """Whether this rank's own gradients can wait in ``grad_buffer``, readable through ``.grad``."""
        return bool(self._views) and self.state is not GradState.REDUCED

    def before_accumulate(self, index: int) -> None:
        """Autograd is about to add to slot ``index``'s gradient: take a reduced one out of ``.grad``.

        The new gradient then arrives alone, to be reduced and added. A ``.grad`` that is not what the bucket put there
        was zeroed or replaced by the user, and what the bucket holds of it is stale.
        """
        if self.state is not GradState.REDUCED:
            return
        parameter = self.params[index]
        if index in self._taken:
            if parameter.grad is None:
                self._forget([index])
        elif parameter.grad is self._handles()[index]:
            parameter.grad = None
        else:
            self._forget([index])
        self._taken.add(index)

    def collect(self) -> bool:
        """Move this rank's gradients into ``grad_buffer``, unscaled; every ``.grad`` becomes a view of it.

        Returns whether anything had changed since the last time.
        """
        local, gone = self._scan()
        if not local and not gone:
            return False
        self._forget(gone)
        self._leave_what_is_kept()
        sources = self._present()
        self._pack(sources, self.grad_buffer, 1.0)
        self.state = GradState.LOCAL if sources else GradState.EMPTY
        for index, _ in sources:
            self.params[index].grad, self.used[index] = self._views[index], 1
        return True

    def launch(self, buffers: CommBuffers) -> None:
        """Pack this rank's gradients, scaled by 1/N, and start their reduction; it adds to one that is there.

        Every ``.grad`` becomes a handle of the reduced gradient, also where only other ranks used the parameter: so a
        ``.grad`` found None later was zeroed by the user.
        """
        self.wait()
        local, gone = self._scan()
        self._forget(gone)
        accumulate = self.state is GradState.REDUCED and len(self._stale) < len(self.params)
        if accumulate:
            self._drop_stale()
        else:
            self._leave_what_is_kept()
        sources = self._present() if self.state is GradState.LOCAL else local
        in_place = self.keeps_full and self.grad_buffer.dtype == self.reduce_dtype and not accumulate
        full = self.grad_buffer if in_place else self._borrow(buffers, self.layout.numel)
        self._pack(sources, full, 1 / self.sharding.comm.world_size, accumulate)
        self.state = GradState.REDUCED
        self._taken.clear()
        for index, _ in sources:
            self.used[index] = 1
        for parameter, handle in zip(self.params, self._handles(), strict=True):
            parameter.grad = handle
        del sources, local  # what was packed goes before memory is taken to receive into
        allocate(self.grad_buffer)
        self.pending = self._reduce(full, buffers, accumulate)
        self._buffers = buffers

    def _reduce(self, full: Tensor, buffers: CommBuffers, accumulate: bool) -> Pending:
        comm = self.sharding.comm
        if self.sharding.stage >= 1:
            return comm.reduce_scatter(full, self.grad_shard, partial(self._borrow, buffers), accumulate=accumulate)
        if full is self.grad_buffer:
            return comm.all_reduce(full)
        store = self.grad_shard.add_ if accumulate else self.grad_shard.copy_
        return comm.all_reduce(full, on_arrival=lambda: store(full))

    def wait(self) -> None:
        """Order what follows after the arrival of the reduction."""
        if self.pending is not None and self._buffers is not None:
            self.pending.wait()
            self._buffers.release(self)
            if self._buffers.poison and self.keeps_full and self.sharding.stage >= 1:
                self._poison_others()
            self.pending = self._buffers = None

    def _borrow(self, buffers: CommBuffers, numel: int) -> Tensor:
        return buffers.take(self, numel, self.reduce_dtype)

    def _poison_others(self) -> None:
        """Reduced in place: what ``grad_buffer`` holds beside this rank's shard has been communicated, too."""
        kept = self.grad_shard.clone()
        self.grad_buffer.fill_(torch.nan)
        self.grad_shard.copy_(kept)

    def unshard(self) -> None:
        """Start to bring in every rank's shard of the parameters. At stage 3 units do, as they are used."""
        if self.sharding.shards > 1 and self.sharding.stage < 3:
            self.gather = self.sharding.comm.all_gather(self.flat.full)

    def wait_for_parameters(self) -> None:
        """Order what follows after the arrival of the parameters."""
        if self.gather is not None:
            self.gather.wait()
            self.gather = None

    def settle(self) -> Settled:
        """After the last reduction: drop what was zeroed since."""
        local, gone = self._scan()
        self._forget(gone)
        if self.state is GradState.REDUCED:
            self.wait()
            self._drop_stale()
        late = self._present() if self.state is GradState.LOCAL else local
        return Settled([self.layout.slots[index].param for index, _ in late], bool(gone))

    def abandon(self) -> None:
        """Wait for nothing any more: the ranks have parted."""
        self.pending = self._buffers = self.gather = None

    def clear(self) -> None:
        """Forget every gradient. At stage 3 their memory goes, else it stays."""
        self.wait()
        for parameter in self.params:
            parameter.grad = None
        self.used = bytearray(len(self.params))
        self._taken.clear()
        self._stale.clear()
        self.refused.clear()
        self.state = GradState.EMPTY
        if self.flat.sharded:
            self._leave_what_is_kept()
            deallocate(self.grad_buffer)

    def zero(self) -> None:
        """Make every gradient that is there zero, as ``zero_grad(set_to_none=False)`` means."""
        self.wait()
        if self.state is not GradState.EMPTY:
            (self.grad_shard if self.state is GradState.REDUCED else self.grad_buffer).zero_()
        for _, grad in self._scan()[0]:
            grad.detach_().zero_()

    def _handles(self) -> Sequence[Tensor | None]:
        """What each ``.grad`` is while the bucket holds the slot's gradient."""
        if self.state is GradState.EMPTY:
            return [None] * len(self.params)
        return self._views if self.state is GradState.LOCAL or not self._shards else self._shards

    def _scan(self) -> tuple[list[tuple[int, Tensor]], list[int]]:
        """Read each ``.grad``: gradients not in the bucket yet; slots zeroed or replaced since they were."""
        local: list[tuple[int, Tensor]] = []
        gone: list[int] = []
        handles = self._handles()
        if all(map(operator.is_, map(_grad_of, self.params), handles)):
            return local, gone
        grads = [parameter.grad for parameter in self.params]
        reduced = self.state is GradState.REDUCED
        for index, (grad, handle) in enumerate(zip(grads, handles, strict=True)):
            if grad is handle:
                continue
            if grad is not None:
                local.append((index, grad))
            there = index not in self._taken if reduced else self.used[index]
            if there or (grad is None and index in self._taken):
                gone.append(index)
        return local, gone

    def _present(self) -> list[tuple[int, Tensor]]:
        return [(index, p.grad) for index, p in enumerate(self.params) if p.grad is not None]

    def _forget(self, indices: Sequence[int]) -> None:
        """The user zeroed or replaced these slots' gradients: what the bucket holds of them is stale."""
        for index in indices:
            self.used[index] = 0
        self._stale.update(indices)

    def _drop_stale(self) -> None:
        """Take stale slots out of ``grad_shard``: all of them in one go, else one by one."""
        if len(self._stale) == len(self.params):
            self.grad_shard.zero_()
        else:
            for index in self._stale:
                (self._shards or self._views)[index].zero_()
        self._stale.clear()

    def _pack(
        self, sources: Sequence[tuple[int, Tensor]], full: Tensor, scale: float, accumulate: bool = False
    ) -> None:
        grads = [self._absent] * len(self.params)
        usual = {(self.dtype, torch.strided, self.device, False)}
        if {_kind_of(grad) for _, grad in sources} <= usual and all(grad.is_contiguous() for _, grad in sources):
            for index, grad in sources:
                grads[index] = grad
        else:
            for index, grad in sources:
                grads[index] = self._checked_or_refused(index, grad)
        flags = torch.empty_like(self.nonfinite) if accumulate else self.nonfinite
        torch.ops.zero_kernels.pack(grads, self.offsets, full, scale, flags)
        if accumulate:
            torch.maximum(self.nonfinite, flags, out=self.nonfinite)
        self._stale.clear()  # pack zeroes the gaps

    def _checked_or_refused(self, index: int, grad: Tensor) -> Tensor:
        try:
            return self._checked(index, grad)
        except GradientError as error:
            if not self.sharding.reduces:
                raise
            self.refused[index] = str(error)  # the others count on this rank: the exchange tells them all
            return self._absent

    def _checked(self, index: int, grad: Tensor) -> Tensor:
        if grad.layout is not torch.strided or grad.dtype != self.dtype or grad.device != self.device:
            raise GradientError(
                f"the gradient of {self.label(index)} is {grad.dtype} {grad.layout} on {grad.device}; expected a dense "
                f"{self.dtype} on {self.device}. For an embedding, build it with sparse=False"
            )
        return grad.detach().contiguous()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound = method()
    if bound is not None:
        bound()
