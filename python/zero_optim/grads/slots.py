"""The state of each gradient in a bucket: what the bucket holds of it, and what ``.grad`` shows.

``Slots`` keeps the states, ``Shown`` the tensors over the bucket's memory that ``.grad`` shows. As an example, two
backwards and a user in between::

    backward            AVERAGED   .grad is a FlatShard
    p.grad = None       AVERAGED   nobody has looked yet
    backward begins     STALE      accumulate looks: the user zeroed it
    its bucket leaves   AVERAGED   the average of the second backward alone
"""

from __future__ import annotations

import enum
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..comm.handle import Arrivals
from ..comm.sharding import Sharding
from ..comm.streams import references_in_cpp
from ..params.flat_params import FlatParams
from ..params.flat_shard import FlatShard
from ..params.layout import SlotPiece
from ..params.tensor_slice import local_of, shown_as

_grad_of, _version_of = operator.attrgetter("grad"), operator.attrgetter("_version")
_ALONE = max(map(sys.getrefcount, [object()]))  # the count of an object that one list alone refers to


class SlotState(enum.Enum):
    """State of one slot: what the bucket holds of its gradient. ``tests/grads/test_slots_cells.py`` has the events."""

    ABSENT = enum.auto()  # nothing
    COLLECTED = enum.auto()  # this rank's sum; ``.grad`` is its view
    AVERAGED = enum.auto()  # the average; ``.grad`` shows it
    TAKEN = enum.auto()  # the average; ``.grad`` is None, or a gradient of this rank beside it
    STALE = enum.auto()  # what the user has dropped: zeroed before the next sum is added


class GradState(enum.Enum):
    """State of a bucket: where its gradients are in memory. It says which states its slots can have."""

    EMPTY = enum.auto()  # nowhere, or in each ``.grad`` that autograd allocated: ABSENT
    LOCAL = enum.auto()  # grad_buffer holds this rank's sums in full: ABSENT, COLLECTED
    REDUCED = enum.auto()  # grad_shard holds the average, or will when it arrives: AVERAGED, TAKEN, STALE


@dataclass
class Found:
    """Findings of a scan of every ``.grad``, by slot.

    Attributes:
        local: gradients of this rank that the bucket does not hold.
        gone: slots whose gradient the bucket held, and the user has zeroed or replaced since.
        zeroed: TAKEN slots whose local gradient the user may have zeroed in place: it was written since its backward.
            ``module.zero_grad(set_to_none=False)`` sees that gradient alone, and means the average as well. So where
            the local gradient is all zero now, the average becomes zero, too.
    """

    local: list[tuple[int, Tensor]] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)
    zeroed: list[tuple[int, Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class _LocalGrad:
    """A local gradient beside an average, and its version, as its backward left them: a change since is the user's."""

    grad: Tensor
    version: int


class Slots:
    """The states of a bucket's slots.

    Attributes:
        bucket_state: where the gradients are.
        used: one byte a slot, 1 where this rank has put a gradient of it into the bucket.
        stale: the slots in that state.
        touched: TAKEN slots that the running backward has added to.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        # One state of the bucket, and what differs from it: for a parameter, a usual step only compares its ``.grad``
        # with its handle.
        self.bucket_state = GradState.EMPTY
        self.used = bytearray(len(params))
        self.stale: set[int] = set()
        self._taken: dict[int, _LocalGrad | None] = {}
        self.touched: set[int] = set()

    def __getitem__(self, index: int) -> SlotState:
        if self.bucket_state is GradState.EMPTY:
            return SlotState.ABSENT
        if self.bucket_state is GradState.LOCAL:
            return SlotState.COLLECTED if self.used[index] else SlotState.ABSENT
        if index in self.stale:
            return SlotState.STALE
        return SlotState.TAKEN if index in self._taken else SlotState.AVERAGED

    # -- events ----------------------------------------------------------------------------------------------------

    def accumulate(self, index: int, handle: Tensor | None) -> bool:
        """Make way for autograd in this slot's ``.grad``. Returns whether the user has written a local gradient."""
        # Autograd may add to a gradient of this rank's own: the sum is local, too.
        if self.bucket_state is not GradState.REDUCED:
            return False
        # A parameter that is used twice comes twice. The gradient in ``.grad`` is then this backward's, and no edit.
        if index in self.touched and index in self._taken:
            return False
        grad = self._params[index].grad
        self._look(index, grad, handle)
        written = self._is_written(index, grad)
        # Out of autograd's way: it would add this rank's own gradient to an average over all ranks.
        if self[index] is SlotState.AVERAGED:
            self._params[index].grad = None
        # The average still counts, beside the gradient that comes now, unless the user has zeroed it.
        if self[index] is not SlotState.STALE:
            self._taken[index] = None  # autograd writes from here on, until ``added``
            self.touched.add(index)
        return written

    def added(self, index: int) -> None:
        """Record what autograd has added to this slot's ``.grad``: now, as a backward that raises has no end."""
        if index in self._taken:
            grad = self._params[index].grad
            self._taken[index] = None if grad is None else _LocalGrad(grad, grad._version)

    def _is_written(self, index: int, grad: Tensor | None) -> bool:
        """True if the user has written into a local gradient beside an average since its backward ended."""
        left = self._taken.get(index)
        return left is not None and left.grad is grad and left.version != grad._version

    def backward_ended(self) -> None:
        """Record the gradients that were added beside an average: who writes into them from here on is the user."""
        for index in self.touched:  # hooks of the user's may have run since ``added``
            self.added(index)
        self.touched.clear()

    def scan(self, handles: Sequence[Tensor | None]) -> Found:
        """Read each ``.grad`` once."""
        found = Found()
        # As a rule nobody has touched any ``.grad``, and one pass in C shows it.
        if all(map(operator.is_, map(_grad_of, self._params), handles)):
            if self._taken or self.stale:  # the user has put a handle back
                self._taken.clear()
                self.stale.clear()
            return found
        grads = map(_grad_of, self._params)
        if self.bucket_state is GradState.EMPTY:  # nothing is held: the usual case, so it is quick
            found.local = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
            return found
        for index, (grad, handle) in enumerate(zip(grads, handles, strict=True)):
            written = self._is_written(index, grad)  # before ``_look``, which may forget what its backward left
            if self._look(index, grad, handle):
                found.gone.append(index)
            if grad is not None and grad is not handle:
                found.local.append((index, grad))
                if written:
                    found.zeroed.append((index, grad))
        return found

    def collect(self, sources: Sequence[tuple[int, Tensor]], views: Sequence[Tensor]) -> None:
        """Show these local gradients, which are in ``grad_buffer`` now, in each ``.grad``."""
        self.bucket_state = GradState.LOCAL if sources else GradState.EMPTY
        for index, _ in sources:
            self.used[index] = 1
            _show(self._params[index], views[index])

    def launch(self, sources: Sequence[tuple[int, Tensor]], handles: Sequence[Tensor]) -> None:
        """Show the result of a reduction, which has left with these gradients, in every ``.grad``."""
        self.bucket_state = GradState.REDUCED
        self._taken.clear()
        self.stale.clear()
        for index, _ in sources:
            self.used[index] = 1
        # Also where only other ranks used the parameter: a ``.grad`` found None later was zeroed by the user.
        for parameter, handle in zip(self._params, handles, strict=True):
            _show(parameter, handle)

    def drop_all(self) -> None:
        """Make all slots STALE: the user has dropped their gradients, though no ``.grad`` shows it."""
        for index, parameter in enumerate(self._params):
            self._make_stale(index)
            parameter.grad = None

    def make_room(self) -> None:
        """Make all slots STALE until ``take_over``: the bucket is to receive reduced gradients."""
        self.bucket_state = GradState.REDUCED
        self.stale.update(range(len(self._params)))

    def take_over(self, index: int, handle: Tensor | None, *, used: bool) -> None:
        """Show this slot's average, which the bucket holds now. ``handle`` None: the user has dropped it."""
        if handle is not None:
            _show(self._params[index], handle)
            self.stale.discard(index)
            self.used[index] = used

    def clear(self) -> None:
        for parameter in self._params:
            parameter.grad = None
        self.bucket_state = GradState.EMPTY
        self.used = bytearray(len(self._params))
        self.stale.clear()
        self._taken.clear()

    # -- the table's columns ---------------------------------------------------------------------------------------

    def _look(self, index: int, grad: Tensor | None, handle: Tensor | None) -> bool:
        """Update one slot's state by its ``.grad``. Returns whether the user has dropped what the bucket held."""
        state = self[index]
        # The handle is there, so the user wants what the bucket holds: also one who has put it back after zeroing.
        if grad is handle and handle is not None:
            if self.bucket_state is GradState.REDUCED:
                self._taken.pop(index, None)
                self.stale.discard(index)
            return False
        # This rank's own sum was zeroed or replaced. What is in ``.grad`` now is packed in its place.
        if state is SlotState.COLLECTED:
            self.used[index] = 0
            return True
        # Of a TAKEN slot ``.grad`` shows the local part alone. Another tensor there, or none, stands for the whole.
        left = self._taken.get(index)
        replaced = grad is None or (left is not None and left.grad is not grad)
        if state is SlotState.AVERAGED or (state is SlotState.TAKEN and replaced):
            self._make_stale(index)
            return True
        return False

    def _make_stale(self, index: int) -> None:
        self._taken.pop(index, None)
        self.stale.add(index)
        self.used[index] = 0


def _show(parameter: Tensor, grad: Tensor) -> None:
    try:
        parameter.grad = grad
    except RuntimeError:  # the user has changed ``grad_dtype``
        parameter.grad, parameter.grad_dtype, parameter.grad = None, grad.dtype, grad


class Shown:
    """The tensors over a bucket's gradient memory that ``.grad`` shows, one for each slot.

    Attributes:
        full: views of the whole gradients; empty where ``buffer`` does not hold them, or in another dtype.
        shards: a ``FlatShard`` each, from stage 1 on, where only this rank's shard has the average; else empty.
    """

    def __init__(
        self,
        buffer: Tensor,
        shard: Tensor,
        flat: FlatParams,
        pieces: Sequence[SlotPiece],
        labels: Sequence[str],
        sharding: Sharding,
        arrivals: Arrivals,
    ) -> None:
        """``shard`` [shard_numel]: this rank's shard of the average, within ``buffer``."""
        self._buffer, self._params, self._sliced, self._arrivals = buffer, flat.params, flat.sliced, arrivals
        self._pieces, self._labels = pieces, labels
        self.full: Sequence[Tensor] = ()
        dtype = sharding.local_dtype(flat.dtype)  # torch lets ``.grad`` have no other
        if sharding.keeps_full_gradients and buffer.dtype == dtype:
            self.full = flat.slot_views(buffer)
            if flat.sliced:
                self.full = [*map(shown_as, flat.params, self.full)]
        # A parameter that all tensor-parallel ranks have may have a term of its gradient on each: summed at launch.
        self._terms: Sequence[Tensor] = ()
        if sharding.reduces and flat.sliced and not flat.cut:
            pairs = zip(flat.params, self.full, strict=False)
            self._terms = [shown_as(parameter, local_of(view), term=True) for parameter, view in pairs]
        self.shards: Sequence[FlatShard] = ()
        if sharding.stage >= 1 and sharding.reduces:
            self.shards = [
                FlatShard(
                    shard.narrow(0, piece.in_shard, piece.numel),
                    piece.in_param,
                    parameter.shape,
                    f"gradient of {labels[piece.slot.param]}",
                    dtype,
                    flat.orders[index],
                    flat.slices[index],
                )
                for index, (piece, parameter) in enumerate(zip(pieces, flat.params, strict=True))
            ]
        # The user can take these from the tensors above: the local shard, or the local tensor of a DTensor.
        inner = [view.local for view in self.shards] if flat.sharded else []
        self._inner = [[*map(local_of, self.full)] if flat.sliced else [], inner]
        for view in self.shards:
            view.arrivals = arrivals  # only now: reading ``local`` waits for them, and they may never come
        self._uses = _storage_uses(buffer)  # last: after all lasting views of it, and with no other alive

    def reduced(self) -> Sequence[Tensor]:
        """List what ``.grad`` shows once the bucket is reduced."""
        return self.shards or self.full

    def local(self, terms: set[int]) -> Sequence[Tensor]:
        """List the tensors that ``.grad`` shows of this rank's own gradients, of which ``terms`` are terms of a sum."""
        if not terms:
            return self.full
        # Made each time: a list that is kept would look like a user who keeps gradients.
        return [self._terms[index] if index in terms else view for index, view in enumerate(self.full)]

    def writes(self) -> int:
        """Count the user's writes into them."""
        if self.shards:
            return self._arrivals.zeroed
        # A write through a DTensor shows only in its own version counter.
        return sum(map(_version_of, (*self.full, *self._terms))) if self._sliced else self._buffer._version

    def relabel(self) -> None:
        for shard, piece in zip(self.shards, self._pieces, strict=False):
            shard.label = f"gradient of {self._labels[piece.slot.param]}"

    def kept(self) -> bool:
        """True if the user keeps one of the gradients, or a view of it: its memory must not be written again.

        Programs keep ``p.grad`` over ``zero_grad``, to combine the gradients of several losses.
        """
        if _storage_uses(self._buffer) > self._uses:  # another tensor views the memory
            return True
        if any(max(map(sys.getrefcount, inner), default=0) > _ALONE + 1 for inner in self._inner):
            return True
        for tensors in (self.full, self._terms, self.shards):
            references = [*map(sys.getrefcount, tensors)]
            uses = [*map(references_in_cpp, tensors)]  # all references in Python are one of these
            if max(references, default=0) <= _ALONE and max(uses, default=0) <= 1:
                continue  # the common case: not even ``.grad`` refers to one
            in_grad = [p.grad is tensor for p, tensor in zip(self._params, tensors, strict=True)]
            found = zip(in_grad, references, uses, strict=True)
            if any(count > _ALONE + here or in_cpp > 1 + here for here, count, in_cpp in found):
                return True
        return False


def _storage_uses(tensor: Tensor) -> int:
    """Count the tensors over the same storage, its own Python object included."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses
