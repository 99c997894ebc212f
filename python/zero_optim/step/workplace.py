"""Where one shard is updated, on the device or on the host, and which of its parameters an update joins over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm.handle import Handle
from ..comm.sharding import ranks_of_shards
from ..grads.bucket import Bucket
from ..params.tensor_slice import joint_of
from ..rules.update_rule import CutParameter, ToJoin, UpdateRule, Whole
from ..stores.state_store import HostStore

PARAMETER = "parameter"
"""The name of the parameters' shard beside a page, with which it visits the device where it rests away from it."""


@dataclass(frozen=True)
class Coefficients:
    """Values that are the same for the updates of all shards in a step. See ``ShardUpdate``.

    Attributes:
        hyper: by rule, [parameters, columns] fp32.
        used: [parameters] bool, which have a gradient.
        writes_all: whether each update writes every parameter of its shard, as far as the host knows.
        rates: [parameters, averages] fp32, how far averages go towards the new masters, 0 for parameters that are not
            updated; None: there are no averages.
        measures: whether the update is measured, for ``telemetry()``.
    """

    hyper: Mapping[UpdateRule, Tensor]
    grad_scale: Tensor | None
    found_inf: Tensor
    marks: Tensor
    used: Tensor
    writes_all: bool = False
    rates: Tensor | None = None
    measures: bool = False

    def on_host(self) -> Coefficients:
        """Copy all to host memory, with marks of its own. The host waits for the device."""
        found_inf, used = self.found_inf.cpu(), self.used.cpu()
        return Coefficients(
            {rule: table.cpu() for rule, table in self.hyper.items()},
            None if self.grad_scale is None else self.grad_scale.cpu(),
            found_inf,
            torch.zeros_like(self.marks, device="cpu"),
            used,
            writes_all=bool(found_inf == 0) and bool(used.all()),
            rates=None if self.rates is None else self.rates.cpu(),
            measures=self.measures,
        )


class OnDevice:
    """Brings together what the update of one shard needs. On the device all is there, or visits with the page."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def prefetch(self) -> None:
        """Start copies: the update will follow soon."""

    def leave(self) -> None:
        """Leave the parameters as they are: a pass, or an update that has failed, is over."""

    def gradient(self) -> Tensor:
        """[shard_numel] the reduced gradient."""
        return self._bucket.gradient_to_apply()

    def parameters(self, state: Mapping[str, Tensor], by: Coefficients) -> Tensor:
        """[shard_numel] the parameters, to be written; with their values, unless the update writes all of them."""
        return state.get(PARAMETER, self._bucket.memory.shard)

    def updated(self) -> None:
        """Send the parameters to the device: the update has been launched."""

    def release(self) -> None: ...


class OnHost(OnDevice):
    """Updates on the host: gradients are copied there as reductions arrive, during backward, and parameters back.

    Args:
        reads_parameters: whether the update reads them: they have no master.
    """

    def __init__(self, bucket: Bucket, store: HostStore, *, reads_parameters: bool) -> None:
        super().__init__(bucket)
        self._store, self._reads_parameters = store, reads_parameters
        memory, lanes, numel = store.memory, store.lanes, bucket.layout.shard_numel
        self._grad = memory.take(numel * bucket.grad_shard.element_size()).view(bucket.grad_shard.dtype)
        self._param: Tensor | None = None  # None: the update is where the parameters are
        self._opened = False  # they are open for it
        if not bucket.flat.offloaded:
            self._param = memory.take(numel * bucket.dtype.itemsize).view(bucket.dtype).zero_()
        # Set when: the host has the gradient; it has the parameters; the device has them back; just now.
        self._taken, self._brought, self._sent, self._now = (lanes.mark() for _ in range(4))
        self._source: Tensor | None = None  # what the host's gradient is a copy of; None: it is outdated
        self._source_written = (0, 0)  # the writes into that, as of the copy
        # At stage 0, and alone, the user may edit gradients up to the step. So none is taken before that.
        self._users_may_edit = bucket.sharding.stage == 0 or not bucket.sharding.reduces
        if not self._users_may_edit:
            bucket.follower = self

    def release(self) -> None:
        self._bucket.follower = None
        for mark in (self._taken, self._brought, self._sent):
            mark.wait()  # a copy still uses the memory, which another tensor takes next
        for tensor in (self._grad, self._param):
            if tensor is not None:
                self._store.memory.give_back(tensor.view(torch.uint8))

    # -- the gradient --------------------------------------------------------------------------------------------

    def reduction_launched(self, handle: Handle) -> Callable[[], object]:
        self._source = None
        # The copy waits for the sum on its own stream, beside the rest of backward.
        with self._store.lanes.to_host.as_current():
            ordered = handle.order_current()
        if not ordered:
            return self._reduction_arrived
        self._take(after_current=False)
        return self._taken.order_current  # the user may zero the gradient: not before it is copied

    def _reduction_arrived(self) -> None:
        self._take(after_current=True)
        self._taken.order_current()

    def _take(self, *, after_current: bool) -> None:
        source, lane = self._bucket.grad_shard, self._store.lanes.to_host
        if after_current:  # the gradient is written there
            self._now.set()
            lane.after(self._now)
        lane.copy(self._grad, source)
        lane.set(self._taken)
        self._store.copied.to_host += source.nbytes
        self._source, self._source_written = source, self._written()

    def prefetch(self) -> None:
        is_copied = self._source is self._bucket.gradient_to_apply() and self._source_written == self._written()
        if self._users_may_edit or not is_copied:
            self._take(after_current=True)
        if self._param is None:
            self._bucket.memory.read_ahead()
        if self._reads_parameters:
            self._bring_parameters()

    def _written(self) -> tuple[int, int]:
        # A ``zero_`` of what ``.grad`` shows counts no version up: it runs within the tensor subclass, where torch does
        # not count.
        return self._bucket.grad_shard._version, self._bucket.arrivals.zeroed

    def gradient(self) -> Tensor:
        self._taken.wait()  # the host reads it next
        return self._grad

    # -- the parameters ------------------------------------------------------------------------------------------

    def _bring_parameters(self) -> None:
        if self._param is not None:
            self._sent.wait()  # the copy of the last step still reads ``_param``
            self._now.set()
            lane = self._store.lanes.to_host
            lane.after(self._now)
            lane.copy(self._param, self._bucket.memory.shard)
            lane.set(self._brought)
            self._store.copied.to_host += self._param.nbytes

    def parameters(self, state: Mapping[str, Tensor], by: Coefficients) -> Tensor:
        if self._param is None:
            shard, self._opened = self._bucket.memory.open(), True
            return shard
        if not by.writes_all and not self._reads_parameters:
            self._bring_parameters()
        self._brought.wait()  # the host reads and writes it next: no copy in either direction may be in flight
        self._sent.wait()
        return self._param

    def leave(self) -> None:
        if self._opened:
            self._bucket.memory.close(written=False)
        self._opened = False

    def updated(self) -> None:
        if self._param is None:
            self._bucket.memory.close(written=True)
            self._opened = False
            return
        lanes = self._store.lanes
        self._now.set()
        lanes.to_device.after(self._now)  # earlier work of the current stream may read the old parameters
        lanes.to_device.copy(self._bucket.memory.shard, self._param)
        lanes.to_device.set(self._sent)
        self._sent.order_current()  # the all-gather that comes next on this stream reads the shard
        self._store.copied.to_device += self._param.nbytes


# -- the parameters that an update joins -------------------------------------------------------------------------------


Group = Callable[[int], Mapping[str, Any]]
"""Gives the parameter group of a parameter, by its index."""


def wholes_in(
    bucket: Bucket, rule: UpdateRule, group: Group, *, keeps_views: bool
) -> tuple[tuple[Whole, ...], ToJoin | None]:
    """List the parameters in this rank's shard that ``rule`` has whole, or a slice of each; and those that an update
    makes whole over ranks, or whose work replicas divide. None: there are none of these.

    ``keeps_views``: whether state stays on the device. Else replicas divide no work alone: pages would come twice, and
    state on the host would go to the device and back.
    """
    layout, flat, sharding = bucket.layout, bucket.flat, bucket.sharding
    every: list[Whole] = []  # each as if it began a shard
    if not rule.layout.cuts:
        for slot, parameter, local, order in zip(layout.slots, flat.params, flat.locals, flat.orders, strict=True):
            joint = joint_of(parameter, sharding.plain_slices)
            every.append(Whole(slot.param, 0, local.shape, order, group(slot.param), joint))
    needs_slices = [whole.joint is not None and rule.needs_whole(whole.joint) for whole in every]
    # A rank alone has whole parameters, in host memory perhaps, where they count as sharded, too.
    cut = not rule.layout.cuts and flat.sharded and sharding.shard_count > 1
    ranks = ranks_of_shards(sharding) if cut else []
    wholes: list[Whole] = []
    cuts: list[CutParameter] = []
    for slot, piece, whole, needs in zip(layout.slots, bucket.pieces, every, needs_slices, strict=False):
        if cut:
            cuts.append(CutParameter(whole, tuple((ranks[shard], piece) for shard, piece in layout.parts(slot))))
        # A slice may be empty here, and have elements on other tensor-parallel ranks, at the same place.
        elif piece.numel or (needs and slot.offset // layout.shard_numel == sharding.shard_index):
            wholes.append(whole._replace(start=piece.in_shard))
    sliced = any(needs_slices)  # alike on all tensor-parallel ranks, which have slices of the same parameters
    replicas = sharding.replicas if rule.splits_work and (cut or sliced or keeps_views) else None
    if not cut and not sliced and replicas is None:
        return tuple(wholes), None
    slices = sharding.tensor_ranks.slices if sharding.tensor_ranks is not None and sliced else None
    return tuple(wholes), ToJoin(tuple(wholes), cuts, sharding.shard_group if cut else None, slices, replicas)
