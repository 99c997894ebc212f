"""The state of one bucket's shard: a page in a store, with the tensors that an update rule names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero_kernels import ROW
from zero_kernels.codecs import row_keys

from ..comm.streams import keep_tensors_of
from ..grads.bucket import Bucket
from ..params.flat_shard import FlatShard
from ..params.layout import SlotPiece
from ..params.storage_order import StorageOrder, view_of
from ..params.tensor_slice import shown_as
from ..rules.codec import Begins, Per, StateTensor
from ..rules.update_rule import (
    ShardUpdate,
    UpdateRule,
    exported_for,
    has_master,
    stored_for,
    tensors_for,
)
from ..stores.state_store import HostStore, StateStore
from .workplace import PARAMETER, Coefficients, OnDevice, OnHost, wholes_in

_CHUNK = 2**22
"""Elements that are compared at once: bounds the memory for it to some 50 MB."""


class Extent(NamedTuple):
    """A part of a state tensor: elements of the tensor, flat, as they lie in memory in ``order``.

    Attributes:
        shape: of the tensor of a parameter; state for rows of a slice is a tensor of its own.
        whole: whether the part is all of it.
    """

    shape: tuple[int, ...]
    order: StorageOrder
    start: int
    numel: int
    whole: bool


class ShardState:
    """Updates a shard, and cuts its state into the parameters' parts.

    Attributes:
        numel: elements of the shard, padding included.
        parameters: indices of its parameters, slot by slot.
        device: where it is updated.
        keeps_views: whether the tensors of ``opened`` stay the live state afterwards.
        lookahead: number of pages that are worth prefetching while one is updated.
        tensors: the logical tensors. fp32 parameters have no master: they are their own.
        stored: the stored tensors: a logical one itself, where it has no codec.
        in_state_dict: the tensors of a state dict: the stored ones, but for a split master, which it has in fp32.
        page: its number in the store.
        row_slot: [shard_numel / ROW] int32, the parameter index of each row; -1 for padding.
        wholes: the parameters in it, where the rule has them whole, or a slice of each.
        to_join: the parameters that an update makes whole over ranks, or whose work replicas divide; None: none.
        row_keys: [shard_numel / ROW] int32, keys of each row's noise; None: nothing is rounded by noise.
        numbers: what was measured of the parameters in it, as ``batches.measured`` has it; None: nothing was.
    """

    numbers: Tensor | None = None

    def __init__(
        self,
        bucket: Bucket,
        rule: UpdateRule,
        store: StateStore,
        zeros: Mapping[StateTensor, Iterator[Tensor]],
        *,
        group: Callable[[int], Mapping[str, Any]],
    ) -> None:
        self.bucket, self.rule, self._store = bucket, rule, store
        self.numel, self.parameters = bucket.layout.shard_numel, [slot.param for slot in bucket.layout.slots]
        self.device, self.keeps_views, self.lookahead = store.works_on, store.keeps_views, store.lookahead
        self.tensors, self.stored = tensors_for(rule, bucket.dtype), stored_for(rule, bucket.dtype)
        self.in_state_dict = exported_for(rule, bucket.dtype)
        self._has_master = has_master(rule, bucket.dtype)
        self._place, rests = OnDevice(bucket), bucket.memory.page
        visiting = {} if rests is None else {PARAMETER: (bucket.memory.shard, rests)}
        self._opens_parameters = rests is not None and isinstance(store, HostStore)  # else they visit, or are there
        if isinstance(store, HostStore):
            self._place, visiting = OnHost(bucket, store, reads_parameters=not self._has_master), {}
        page = {tensor.name: next(zeros[tensor]) for tensor in self.stored}
        of_parameters = [page[tensor.name] for tensor in self.stored if tensor.begins is not Begins.ZERO]
        if of_parameters:
            with bucket.memory.opened() as shard:
                torch._foreach_copy_(of_parameters, [shard] * len(of_parameters))
        self.page = store.allocate(page, visiting)
        rows = bucket.layout.row_slot(bucket.sharding.shard_index)
        self.row_slot = torch.tensor(rows, dtype=torch.int32, device=self.device)
        self.wholes, self.to_join = wholes_in(bucket, rule, group, keeps_views=self.keeps_views)
        self.row_keys: Tensor | None = None
        if any(codec.stochastic for codec in rule.codecs.values()):
            # Made of the parameter's index and the row's number in it, however they are cut.
            keys = torch.zeros(len(rows), dtype=torch.int32, device="cpu")
            for piece in bucket.pieces:
                first, count = piece.in_shard // ROW, -(-piece.numel // ROW)
                keys[first : first + count] = row_keys(piece.slot.param, piece.in_param // ROW, count)
            self.row_keys = keys.to(self.device)

    def release(self) -> None:
        """Release the page and all else that is held: nothing needs this state any more."""
        keep_tensors_of(self)
        self._place.release()
        self._store.release(self.page)

    # -- the update ----------------------------------------------------------------------------------------------

    def prefetch(self) -> None:
        """Prefetch page and gradient: an update will follow soon."""
        self._place.prefetch()
        self._store.prefetch(self.page)

    def begin_update(self, by: Coefficients) -> ShardUpdate:
        """Fetch the page, until ``end_pass``, ``end_update`` or ``give_up_update``, for the update or a pass of it."""
        state = self._store.fetch(self.page)
        try:
            return ShardUpdate(
                self._place.gradient(),
                self._place.parameters(state, by),
                state,
                self.row_slot,
                by.hyper[self.rule],
                by.grad_scale,
                by.found_inf,
                by.marks,
                self.wholes,
                self.row_keys,
            )
        except BaseException:
            self.give_up_update()
            raise

    def end_pass(self) -> None:
        """Commit the page: a pass has been launched."""
        self._store.commit(self.page)
        self._place.leave()

    def end_update(self) -> None:
        """Commit the page and send the parameters on: the update, or its last pass, has been launched."""
        self._store.commit(self.page)
        self._place.updated()

    def give_up_update(self) -> None:
        """Discard the page: the update has failed."""
        self._place.leave()
        self._store.discard(self.page)

    @property
    def kind(self) -> tuple[object, ...]:
        """Shards of one kind may be updated in one call. The ranks that join parts and slices, and those that divide
        the work, count: all of them take part in it."""
        of = self.to_join
        ranks = (None, None, None) if of is None else (of.ranks, of.slices, of.replicas)
        return self.rule, self.bucket.dtype, self.bucket.grad_shard.dtype, *ranks

    # -- its parts -----------------------------------------------------------------------------------------------

    @contextmanager
    def opened(self) -> Iterator[Mapping[str, Tensor]]:
        """Fetch the stored tensors, by name, to be read and written in place within, and ``parameter``. After an error
        within, earlier writes may be kept or not."""
        state = self._store.fetch(self.page)
        before = [tensor._version for tensor in state.values()]
        written = False
        try:
            with self.bucket.memory.opened() if self._opens_parameters else nullcontext() as shard:
                yield state if shard is None else {**state, PARAMETER: shard}
            written = before != [tensor._version for tensor in state.values()]
        finally:
            (self._store.commit if written else self._store.discard)(self.page)
            self._store.wait_for_visitors(self.page)

    def values(self, tensor: StateTensor, state: Mapping[str, Tensor], piece: SlotPiece | None = None) -> Tensor:
        """Give the values of one of ``tensors``, or of ``stored``, flat: a view of ``state``, or a decoded copy where
        the tensor has a codec. ``piece``: its values; None: those of all the shard."""
        start, numel = (0, self.numel) if piece is None else (piece.in_shard, piece.numel)
        codec = self.rule.codecs.get(tensor.name)
        if codec is None:
            return state[tensor.name].narrow(0, *tensor.span(start, numel))
        parts = [state[part.name].narrow(0, *part.span(start, numel)) for part in codec.parts(tensor)]
        if codec.reads_parameter:
            parts.append(self.parameter(state).narrow(0, start, numel).to(self.device))
        return codec.decode_flat(tensor, parts)

    def set_part(self, tensor: StateTensor, state: Mapping[str, Tensor], piece: SlotPiece, values: Tensor) -> None:
        """Write a piece's ``values``, flat."""
        codec = self.rule.codecs.get(tensor.name)
        parts = [tensor] if codec is None else codec.parts(tensor)
        written = [values] if codec is None else codec.encode_flat(values.to(self.device))
        for part, encoded in zip(parts, written, strict=True):
            state[part.name].narrow(0, *part.span(piece.in_shard, piece.numel)).copy_(encoded)

    def parameter(self, state: Mapping[str, Tensor]) -> Tensor:
        """[shard_numel] the parameters, to be read and written. ``state``: as ``opened`` gave it."""
        return state.get(PARAMETER, self.bucket.memory.shard)

    def parameter_of(self, state: Mapping[str, Tensor], piece: SlotPiece) -> Tensor:
        """[piece.numel] the parameter's values: a view, or a copy where it is updated on another device."""
        return self.parameter(state).narrow(0, piece.in_shard, piece.numel).to(self.device)

    def master(self, state: Mapping[str, Tensor]) -> Tensor:
        """[shard_numel] the master, or the parameters where they have none: a view, or a decoded copy where the master
        has a codec."""
        tensor = next((tensor for tensor in self.tensors if tensor.begins is Begins.PARAMETER), None)
        return self.parameter(state) if tensor is None else self.values(tensor, state)

    def extent(self, index: int, tensor: StateTensor) -> Extent:
        """Find where this rank's part of slot ``index`` lies in a state tensor."""
        bucket, piece, own = self.bucket, self.bucket.pieces[index], self.bucket.flat.slices[index]
        parameter, order = bucket.params[index], tensor.order(bucket.flat.orders[index])
        start, _ = tensor.span(piece.in_param, 0)
        _, held = tensor.span(piece.in_shard, piece.numel)
        if tensor.per is Per.ROW and own is not None and own.cut is not None:
            return Extent(tensor.shape(parameter.shape, prod(own.local_shape)), order, start, held, False)
        shape = tensor.shape(parameter.shape, parameter.numel())
        return Extent(shape, order, start, held, bucket.sharding.shard_count == 1)

    def shown(self, index: int, tensor: StateTensor, of_shard: Tensor) -> Tensor:
        """Show slot ``index`` of ``of_shard``, a tensor along the shard: a plain view where this rank holds the whole,
        else a ``FlatShard``. Rows of a slice are shown as those of that slice alone."""
        bucket, extent = self.bucket, self.extent(index, tensor)
        if extent.whole:
            view = self.view_in(of_shard, tensor, index)
            return view if tensor.per is Per.ROW else shown_as(bucket.params[index], view)
        start, _ = tensor.span(bucket.pieces[index].in_shard, 0)
        local, own = of_shard.narrow(0, start, extent.numel), bucket.flat.slices[index]
        label = f"{tensor.name} of {bucket.label(index)}"
        return FlatShard(local, extent.start, torch.Size(extent.shape), label, None, extent.order, own)

    def view_in(self, full: Tensor, tensor: StateTensor, index: int, rank: int | None = None) -> Tensor:
        """View slot ``index`` in ``full``, a tensor of a whole bucket, in the slot's shape and memory format.

        ``rank``: of a parameter that is cut, the tensor-parallel rank whose slice it is; None: this one.
        """
        flat = self.bucket.flat
        own, slot, local = flat.slices[index], flat.layout.slots[index], flat.locals[index]
        shape = local.shape if own is None or rank is None else own.on(rank).local_shape
        numel = prod(shape)
        part = full.narrow(0, *tensor.span(slot.offset, numel))
        return view_of(part, tensor.shape(shape, numel), tensor.order(flat.orders[index]))

    def refresh_masters(self, pieces: Sequence[SlotPiece]) -> None:
        """Take a user's writes to these parameters over into the masters; unwritten elements keep their precision."""
        if not self._has_master:  # a split master has its parameter as a part, and follows by itself
            return
        with self.opened() as state:
            master = self.master(state)
            if len(pieces) == len(self.bucket.pieces):
                _follow(master, self.parameter(state).to(self.device))
                return
            for piece in pieces:
                _follow(master.narrow(0, piece.in_shard, piece.numel), self.parameter_of(state, piece))

    def edited(self) -> list[int]:
        """List the slots whose parameters are not the roundings of their fp32 masters."""
        if not self._has_master:
            return []
        with self.opened() as state:
            master = self.master(state)
            pieces = [(master.narrow(0, p.in_shard, p.numel), self.parameter_of(state, p)) for p in self.bucket.pieces]
            return [n for n, (own, p) in enumerate(pieces) if not torch.equal(own.to(p.dtype), p)]

    def restart(self, pieces: Sequence[SlotPiece], only: Collection[str] | None = None) -> None:
        """Make the state of these pieces what it is at construction. ``only``: these, by name; None: all."""
        tensors = [tensor for tensor in self.tensors if only is None or tensor.name in only]
        if not tensors:
            return  # and no page is fetched for nothing
        with self.opened() as state:
            for tensor, piece in itertools.product(tensors, pieces):
                if tensor.begins is Begins.ZERO:
                    first = torch.zeros(tensor.span(0, piece.numel)[1], dtype=tensor.dtype, device=self.device)
                elif tensor.begins is Begins.PARAMETER:
                    first = self.parameter_of(state, piece)
                else:
                    first = self.master(state).narrow(0, piece.in_shard, piece.numel).to(self.device)
                self.set_part(tensor, state, piece, first)


def _follow(master: Tensor, parameter: Tensor) -> None:
    """Set ``master`` to ``parameter`` where the parameter is not its rounding."""
    for own, edited in zip(master.split(_CHUNK), parameter.split(_CHUNK), strict=True):
        kept = own.to(edited.dtype) == edited
        torch.where(kept, own, edited, out=own)
