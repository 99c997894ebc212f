"""The parameters of one bucket as one flat tensor: whole on every rank, or sharded and whole only while in use."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod

import torch
from torch import Tensor

from ..comm.collectives import Comm
from ..comm.handle import Arrivals, Handle, debug_options
from ..comm.sharding import Sharding, gather_slices
from ..comm.streams import allocate, as_own_storage, deallocate, keep_for_current_stream, own_storages
from ..errors import OffloadError
from ..stores.disk_pages import DiskBacking, DiskPage
from ..stores.host_memory import Lanes, Mark
from ..stores.paged_store import HostBacking, HostPage, PartOfPage
from .layout import BucketLayout
from .param_shard import ParamShard
from .storage_order import as_stored, storage_order, strides_of, view_of
from .tensor_slice import is_cut, local_of, slice_of


class ShardMemory:
    """The memory of a shard: on the device; or a page in host memory or on a disk, which is copied there.

    Attributes:
        shard: [shard_numel] the shard. On a disk it is on ``meta``, and has values only within ``opened``.
        page: where it rests away from the device; None: it is there. ``on_disk``: whether on a disk.
        arrivals: what is on its way into it from other ranks. Whoever reads or writes it waits.
    """

    def __init__(self, shard: Tensor, page: HostPage | DiskPage | None = None, lanes: Lanes | None = None) -> None:
        """Move ``shard`` to ``page``. ``lanes``: for copies to the device, where there is a page."""
        self.shard, self.page = shard, page
        self._disk = page.backing if isinstance(page, DiskPage) else None
        self.on_disk = self._disk is not None
        self.arrivals = Arrivals()
        if lanes is not None:
            self._lane, self._allocated, self._copied = lanes.to_device, lanes.mark(), lanes.mark()
        if page is not None:
            self.write(shard)
            self.shard = shard.to("meta") if self.on_disk else page.fetch().view(shard.dtype)

    def part(self, place: int, numel: int) -> ShardMemory:
        """The memory of a part of the shard, the ``place``-th of ``numel`` elements."""
        part = copy.copy(self)
        part.shard = self.shard.narrow(0, place * numel, numel)
        if self.page is not None:
            part.page = PartOfPage(self.page, place * part.shard.nbytes, part.shard.nbytes)
        return part

    @contextmanager
    def copied_to(self, own: Tensor) -> Iterator[None]:
        """Copy the page to ``own``, on the device. What is launched within follows the copy, beside the current stream.

        The unit in use must not wait for the copy of the next one. From a disk the host waits for the read first, and
        for the copy::

            computing   allocate ── mark a    the unit in use ............... wait for b    this unit
            lane                              wait for a; copy; gather ── mark b
        """
        assert self.page is not None
        self._allocated.set()  # the computing stream may still use the memory that ``own`` has been given
        self._lane.after(self._allocated)
        with self._lane.as_current():
            arrives = False
            with self.recording():
                self._lane.copy(own, self.page.fetch().view(own.dtype))
                self._lane.set(self._copied)
                self.page.discard(self._copied)
                arrives = True
            if not arrives:  # all ranks gather NaN, and raise before a step takes place
                own.fill_(torch.nan)
            yield

    def order_after_copy(self) -> None:
        """Order what follows on the current stream after the last copy to the device."""
        if self.page is not None:
            self._copied.order_current()

    def wait_until_copied(self) -> None:
        """Wait before the page is written: the host writes at once, whatever the device still reads of it."""
        if self.page is not None:
            self._copied.wait()

    def read_ahead(self) -> None:
        """Begin to read from a disk: ``copied_to`` or ``open`` will follow soon."""
        with self.recording():
            if self.page is not None:
                self.page.prefetch()

    @contextmanager
    def opened(self) -> Iterator[Tensor]:
        """Give [shard_numel] the shard, to be read and written within. From a disk it comes for that time, and goes
        back where it was written. Raises OffloadError where it cannot be read."""
        shard = self.open()
        before = shard._version
        try:
            yield shard
        finally:
            self.close(written=shard._version != before)

    def open(self) -> Tensor:
        """Do as ``opened`` does, until ``close``."""
        self.arrivals.wait()
        if self.page is None:
            return self.shard
        self.wait_until_copied()
        with torch.inference_mode(False):  # in one a view as another dtype lacks a version counter
            return self.page.fetch().view(self.shard.dtype)

    def close(self, *, written: bool) -> None:
        if self.page is not None:
            (self.page.commit if written else self.page.discard)(Mark())

    def write(self, values: Tensor) -> None:
        """Write ``values`` to the page, all of it, which is not read for that. Raises OffloadError."""
        assert self.page is not None
        self.wait_until_copied()
        self.page.overwrite().view(values.dtype).copy_(values)
        self.page.commit(Mark())

    def recording(self) -> AbstractContextManager[None]:
        """See ``DiskBacking.recording``."""
        return nullcontext() if self._disk is None else self._disk.recording()


class FlatParams:
    """Parameters of one dtype, each a view of ``full``.

    Attributes:
        params: the plain parameters. Whatever ``full`` does, they stay the same objects, with the same hooks.
        slices: of each of ``params``, the tensor-parallel slice of it that is here; None: it is plain.
        sliced: whether one of them has a slice.
        cut: whether they are cut over the tensor-parallel ranks: all of them, or none.
        joined: whether a whole parameter is put together of slices: of DTensors, never of plain tensors.
        full: [numel] all parameters. Where they are sharded its storage is empty but for the time of their use: it is
            resized, never replaced, since tensors that autograd saves in a forward alias it.
        sharding: over which ranks: that of experts, or of all other parameters.
        shard: [shard_numel] this rank's shard: a view of ``full``, or memory of its own where sharded.
        memory: that of ``shard``, which on a disk has values only while that is opened.
        param_shards: where sharded, the stand-ins for ``params`` that modules hold while ``full`` is empty.
        trained: whether they get gradients, and an optimizer's state.
        orders: of each of ``params``, the order of its elements in its slot: contiguous, or channels_last.
        permuted: whether one of them is not contiguous.
        offloaded: whether the shard rests in host memory or on a disk.
        shown: where sharded, whether the plain parameters have values now.
        addresses: of each of ``params`` while it has values.
    """

    def __init__(
        self, layout: BucketLayout, params: Sequence[Tensor], sharding: Sharding, *, trained: bool = True
    ) -> None:
        """Move ``params``, whole on this rank, into one flat tensor."""
        self.layout, self.params, self.trained = layout, list(params), trained
        self.sharding = sharding
        self.dtype, self.device = self.params[0].dtype, self.params[0].device
        self.pieces = tuple(layout.pieces(sharding.shard_index))
        self.sharded = self.shown = self.offloaded = False
        self.param_shards: list[ParamShard] = []
        self.slices = [slice_of(parameter) for parameter in self.params]
        self.sliced, self.cut = any(self.slices), is_cut(self.params[0])
        self.joined = self.cut and self.sliced
        self.orders = [storage_order(local) for local in self.locals]
        self.permuted = any(self.orders)
        self.full = torch.zeros(layout.numel, dtype=self.dtype, device=self.device)
        self.shard = sharding.own_part(self.full)
        self.memory = ShardMemory(self.shard)
        self._views = self.slot_views(self.full)
        locals = self.locals
        before = [local.data for local in locals]
        torch._foreach_copy_(self._views, before)
        keep_for_current_stream(*before)  # the copy may still read them when the loop below drops the last reference
        for local, own in zip(locals, own_storages(self.full, self._views), strict=True):
            local.data = own
        self._locate(self.full)

    @property
    def locals(self) -> Sequence[Tensor]:
        """The tensors that have the values of ``params``: others than these only where there are slices."""
        return [local_of(parameter) for parameter in self.params] if self.sliced else self.params

    @property
    def stack(self) -> tuple[int, int]:
        """The number of plain slices of each parameter, and the number of this rank's among them."""
        return (self.sharding.slice_count, self.sharding.slice_index) if self.cut and not self.sliced else (1, 0)

    @property
    def holders(self) -> tuple[int, int]:
        """The number of ranks that have this rank's shard, and the number of this rank among them."""
        return self.sharding.holders(cut=self.cut)

    def slot_views(self, full: Tensor) -> list[Tensor]:
        """View ``full`` [numel] as each parameter, in the shape and the memory format that it has here."""
        kinds = [(local.shape, order) for local, order in zip(self.locals, self.orders, strict=True)]
        strides = {kind: strides_of(*kind) for kind in set(kinds)}
        start = full.storage_offset()
        return [  # one call of torch for each parameter: narrow and view would be two
            full.as_strided(kind[0], strides[kind], start + slot.offset)
            for slot, kind in zip(self.layout.slots, kinds, strict=True)
        ]

    def _locate(self, full: Tensor) -> None:
        start, itemsize = full.data_ptr(), self.dtype.itemsize
        self.addresses = [start + slot.offset * itemsize if slot.numel else 0 for slot in self.layout.slots]

    # -- where they are sharded ----------------------------------------------------------------------------------

    def split(
        self, shards: Sequence[ParamShard], *, backing: HostBacking | DiskBacking | None, lanes: Lanes | None = None
    ) -> None:
        """Keep this rank's shard, and empty ``full``.

        Args:
            shards: the stand-in for each parameter, which shows this rank's range of it from now on.
            backing: where the shard is to rest; None: on the device.
            lanes: for copies to the device, where the shard rests away from it.

        Raises OffloadError where there is no memory, or no room on the disk; RankMismatchError on the other ranks.
        """
        self.offloaded, shard = backing is not None, self.shard
        if backing is None:
            self.memory = ShardMemory(shard.clone())
        else:
            with self.sharding.world.raising_together("shard_module", self.device):
                self.memory = ShardMemory(shard, backing.allocate(shard.nbytes), lanes)
        self.shard = shard = self.memory.shard
        self.sharded, self.param_shards = True, list(shards)
        self._node_part: Tensor | None = None  # [numel / ranks of a node]
        self._poison = "poison" in debug_options()
        self._nothing = _nothing(self.dtype, self.device)
        for param_shard, piece in zip(shards, self.pieces, strict=True):
            param_shard._local, param_shard.start = shard.narrow(0, piece.in_shard, piece.numel), piece.in_param
            param_shard.flat, param_shard.arrivals = self, self.memory.arrivals
        self.reshard()

    def unshard(self, node: Comm | None) -> Handle | None:
        """Start to fill ``full``: from the ranks of ``node`` where they keep all of it, else from all ranks."""
        self.memory.arrivals.wait()
        allocate(self.full)
        if node is not None and self._node_part is not None:
            return node.all_gather(self.full, "node_all_gather", own=self._node_part)
        if self.memory.page is None:
            return self.sharding.all_gather(self.full, own=self.shard)
        with self.memory.copied_to(self.sharding.own_part(self.full)):
            return self.sharding.all_gather(self.full)

    def complete_shard(self, gather_across: Callable[[Tensor], Handle]) -> Handle | None:
        """Start to fill ``shard`` from the ranks that have updated the other parts of it. Away from the device it is
        filled on return, and one shard at a time is on the device."""
        if self.memory.page is None:
            gather = gather_across(self.shard)
            self.memory.arrivals.expect(gather)
            return gather
        # Where a disk fails all ranks gather NaN, and raise in the next step.
        here = torch.full(self.shard.shape, torch.nan, dtype=self.dtype, device=self.device)
        with self.memory.recording(), self.memory.opened() as shard:
            here.copy_(shard)
        gather_across(here).wait()
        with self.memory.recording():
            self.memory.write(here)
        return None

    def show(self) -> None:
        """Give the plain parameters their values: ``full`` is there."""
        for local, view in zip(self.locals, self._views, strict=True):
            local.data = view
        self._locate(self.full)
        self.shown = True
        self._versions = [parameter._version for parameter in self.params]  # edits from here on are the user's

    def first_moved(self) -> int | None:
        """Find the first slot with a gradient whose parameter was cast, moved or given other strides; at stage 3, also
        other memory. Below it ``take_assigned`` takes that over."""
        stored = self.locals
        if self.permuted:  # by default: no work for each parameter
            stored = [as_stored(tensor, order) for tensor, order in zip(stored, self.orders, strict=True)]
        if [*map(Tensor.data_ptr, stored)] == self.addresses and all(map(Tensor.is_contiguous, stored)):
            return None  # a cast shows by the address
        for slot, (view, place) in enumerate(zip(stored, self.addresses, strict=True)):
            moved = view.data_ptr() != place or not view.is_contiguous()
            if moved and self.params[slot].grad is not None and not self._is_assigned(slot):
                return slot
        return None

    def first_cast(self) -> int | None:
        """Find the first slot whose parameter has another dtype, or is on another kind of device, by now."""
        kinds = [local.dtype == self.dtype and local.device.type == self.device.type for local in self.locals]
        return kinds.index(False) if False in kinds else None

    def moved(self) -> list[Tensor]:
        """List the ``params`` that were cast or given other memory while they were shown, and show them again."""
        moved = [self.params[number] for number in self.elsewhere()]
        if moved:
            self.show()
        return moved

    def keep_edits(self, *, unseen: bool = False) -> None:
        """Take in-place writes to the plain parameters since ``show`` over into the shard. ``unseen``: also those that
        no version counter shows."""
        versions = [parameter._version for parameter in self.params]
        if unseen or versions != self._versions:
            with self.memory.recording(), self.memory.opened() as shard:
                shard.copy_(self.sharding.own_part(self.full))
            self._versions, self._node_part = versions, None

    def reshard(self, node: Comm | None = None) -> None:
        """Empty ``full``. With ``node``, keep what this rank needs to fill it again from the ranks of its node."""
        if self.shown:
            self.keep_edits()  # the gathered copy is lost below
        if node is not None and self._node_part is None:
            self._node_part = node.own_part(self.full).clone()
        elif node is None:
            self._node_part = None
        self.hide()
        if self._poison:  # a kernel that still reads freed memory would see valid numbers, most often
            self.full.fill_(torch.nan)
        else:
            deallocate(self.full)

    def nbytes(self) -> int:
        """Bytes in use beside the shard."""
        if not self.sharded:
            return 0
        part = 0 if self._node_part is None else self._node_part.nbytes
        return part + self.full.untyped_storage().nbytes()

    # -- for the user to read and write --------------------------------------------------------------------------

    def gathered(self) -> Tensor:
        """Collective. [numel] all parameters, in memory of their own."""
        whole = torch.empty(self.layout.numel, dtype=self.dtype, device=self.device)
        with self._together(), self.memory.opened() as shard:
            self.sharding.own_part(whole).copy_(shard)
        if (gather := self.sharding.all_gather(whole, "gather_parameters")) is not None:
            gather.wait()
        return whole

    def wholes(self, full: Tensor) -> list[Tensor]:
        """Collective where they are ``joined``. Make each parameter whole, of ``full`` [numel] as ``gathered`` gave it:
        a view, or a copy where tensor-parallel ranks have slices."""
        if not self.joined:
            return self.slot_views(full)
        every = gather_slices(self.sharding, full, "gather_parameters")
        found = []
        for slot, own, order in zip(self.layout.slots, self.slices, self.orders, strict=True):
            assert own is not None
            shapes = [own.on(rank).local_shape for rank in range(own.ranks)]
            flats = [row.narrow(0, slot.offset, prod(shape)) for row, shape in zip(every, shapes, strict=True)]
            slices = [view_of(flat, shape, order) for flat, shape in zip(flats, shapes, strict=True)]
            found.append(torch.cat(slices, own.dim))
        return found

    def copy_out(self) -> Tensor:
        """Collective. Give the plain parameters memory of their own, which the user's views may keep after ``hide``."""
        whole = self.gathered()
        for local, view in zip(self.locals, self.slot_views(whole), strict=True):
            local.data = as_own_storage(view)
        self._locate(whole)
        self.shown = True
        return whole

    def write_back(self, whole: Tensor) -> None:
        """Collective. Keep rank 0's values of ``whole``, which ``copy_out`` gave."""
        self.sharding.alike(cut=self.cut).broadcast(whole, "gather_parameters")
        with self._together(), self.memory.opened() as shard:
            new = self.sharding.own_part(whole).to(shard.device)
            for parameter, piece in zip(self.params, self.pieces, strict=True):
                own = slice(piece.in_shard, piece.in_shard + piece.numel)
                if not torch.equal(new[own], shard[own]):  # the optimizer has to update its master, on every rank
                    torch.autograd.graph.increment_version(parameter)
            shard.copy_(new)

    def _together(self) -> AbstractContextManager[None]:
        """Collective where the shard is on a disk: an OffloadError of any rank within it is raised on all."""
        if not self.memory.on_disk:
            return nullcontext()
        world = self.sharding.world
        return world.raising_together("gather_parameters", self.device, elsewhere=OffloadError)

    def elsewhere(self) -> list[int]:
        """List the numbers of ``params`` that are no views of ``full`` any more."""
        here = enumerate(zip(self.locals, self.addresses, strict=True))
        return [n for n, (local, place) in here if local.dtype != self.dtype or local.data_ptr() != place]

    def take_assigned(self) -> None:
        """Copy tensors that were assigned to ``.data``, as ``vector_to_parameters`` does, into their places in
        ``full``. The parameters are views of it again. ``first_moved`` finds what is no such tensor."""
        if self.sharded or [*map(Tensor.data_ptr, self.locals)] == self.addresses:
            return
        for number in filter(self._is_assigned, self.elsewhere()):
            self._views[number].copy_(self.locals[number].detach())
            self.locals[number].data = self._views[number]
            torch.autograd.graph.increment_version(self.params[number])  # an fp32 master has to see the edit

    def _is_assigned(self, number: int) -> bool:
        """Whether the tensor of a parameter that is elsewhere differs from its place in values alone."""
        kinds = [(t.shape, t.stride(), t.dtype, t.device) for t in (self.locals[number], self._views[number])]
        return not self.sharded and kinds[0] == kinds[1]

    def take_replaced(self, whole: Tensor) -> Tensor | None:
        """Copy tensors that were assigned to ``.data`` since ``copy_out`` gave ``whole`` into that. Returns the first
        parameter whose tensor has another shape."""
        for number in self.elsewhere():
            local, view = self.locals[number].detach(), self._views[number]
            if local.shape != view.shape:
                return self.params[number]
            slot = self.layout.slots[number]
            view_of(whole.narrow(0, slot.offset, slot.numel), view.shape, self.orders[number]).copy_(local)
        return None

    def put_away(self) -> None:
        """Free the memory of ``full``. The parameters read as NaN and refuse writes.

        The user's views of them, such as ``p.data``, have no memory either until ``bring_back``.
        """
        self._storages = [local.untyped_storage() for local in self.locals]
        self._nothing = _nothing(self.dtype, self.device)
        self.hide()
        for storage in self._storages:  # of the user's views, too, which would keep the memory alive
            storage._swap_data_ptr_(self.full.new_empty(0).untyped_storage())  # type: ignore[attr-defined]
        deallocate(self.full)

    def bring_back(self) -> None:
        """Give all views of the parameters their memory again: ``full`` has its memory and values."""
        for local, view, storage in zip(self.locals, self._views, self._storages, strict=True):
            storage._swap_data_ptr_(as_own_storage(view).untyped_storage())  # type: ignore[attr-defined]
            local.data = view.new_empty(0).set_(storage, 0, view.shape, view.stride())
        self._storages = []
        self._locate(self.full)

    def hide(self) -> None:
        """Take the values of the plain parameters away."""
        self.shown = False
        for local, view in zip(self.locals, self._views, strict=True):
            local.data = self._nothing.expand(view.shape)


def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor [] that reads as NaN and refuses writes: for plain parameters that have no memory.

    Under torch's sanitizer, which asks every tensor for its address, it refuses nothing.
    """
    nothing = torch.full((), torch.nan, dtype=dtype, device=device)
    if "TORCH_CUDA_SANITIZER" not in os.environ:
        torch._C._set_throw_on_mutable_data_ptr(nothing)
    return nothing
