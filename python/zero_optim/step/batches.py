"""Batches: shards that one call of the rule updates; where they are updated; and the parameters that they join.

A call costs the host time, and a launch costs a GPU time, however few elements are updated. Where many ranks shard a
bucket that is longer than the update itself. But the parameters of a shard are sent out only when its update has been
launched. So a batch has small neighbours, alike in rule and dtypes, and no more elements than are updated in about the
time of a call.

Where an update joins parameters that are cut over ranks, a batch has a least number of parameters a rank, so that all
ranks have about as much to do, and of elements, so that no message is small. It is not much larger either, since
messages take memory. Its pages are fetched twice: before the parameters are joined, and after.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..comm.chain import Chain
from ..comm.collectives import Pending
from ..comm.spans import span
from ..errors import OffloadError
from ..grads.bucket import Bucket
from ..params.joint import Joint, joint_of
from ..rules.homes import Size, batch_lengths
from ..rules.update_rule import CutParameter, ShardUpdate, ToJoin, UpdateRule, Whole
from ..stores.state_store import HostStore

if TYPE_CHECKING:
    from .shard_state import ShardState

ON_A_GPU, ON_A_PROCESSOR = 2**22, 2**16
"""Elements of a batch, at most. By the bytes that it moves, such an update takes some 30 µs on an H200. Nobody has
measured that. On two threads of a processor 2^20 elements took 290 µs, so 2^16 take some 20."""

PARAMETER = "parameter"
"""The name under which a parameter visits with the page, where its shard rests in host memory."""


# -- state that an I/O error has lost ----------------------------------------------------------------------------------


class Holder(Protocol):
    """Has the state of some parameters, by index: a shard, or a batch of shards."""

    @property
    def parameters(self) -> list[int]: ...


class LostState:
    """The record of what this rank has lost. It is never cleared: only a new optimizer has whole state.

    Within a step other ranks wait for this one in a collective. So it records an error there instead of raising it, and
    all ranks raise in the next exchange, and in each one after it.

    Attributes:
        parameters: indices of the parameters whose state is lost.
        reasons: the errors, in words.
    """

    def __init__(self) -> None:
        self.parameters: set[int] = set()
        self.reasons: list[str] = []

    def record(self, parameters: Sequence[int], error: OffloadError) -> None:
        self.parameters |= set(parameters)
        if str(error) not in self.reasons:
            self.reasons.append(str(error))
            warnings.warn(f"{error}. The next step will raise, on every rank", stacklevel=2)

    def recording(self, of: Holder) -> _Recording:
        """Make a context that records an OffloadError within it as a loss of these parameters' state."""
        return _Recording(self, of)

    @contextmanager
    def opened(self, shard: ShardState) -> Iterator[Mapping[str, Tensor]]:
        """Open ``shard``. An OffloadError is recorded, and raised."""
        try:
            with shard.opened() as state:
                yield state
        except OffloadError as error:
            self.record(shard.parameters, error)
            raise

    def check(self) -> None:
        """Raise OffloadError where state is lost."""
        if self.parameters:
            raise OffloadError("; ".join(self.reasons))


class _Recording:
    """See ``LostState.recording``. A class adds no frame between ``step`` and an update's kernel."""

    def __init__(self, lost: LostState, of: Holder) -> None:
        self._lost, self._of = lost, of

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, OffloadError):
            return False
        self._lost.record(self._of.parameters, error)
        return True


# -- where a shard is updated ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coefficients:
    """Values that are the same for the updates of all shards in a step. See ``ShardUpdate``.

    Attributes:
        hyper: by rule, [parameters, columns] fp32.
        used: [parameters] bool, which have a gradient.
        updates: whether anything is updated, as far as the host knows.
        writes_all: whether each update writes every parameter of its shard, as far as the host knows.
        rates: see ``ShardUpdate``.
    """

    hyper: Mapping[UpdateRule, Tensor]
    grad_scale: Tensor | None
    found_inf: Tensor
    marks: Tensor
    used: Tensor
    updates: bool = True
    writes_all: bool = False
    rates: Tensor | None = None

    def on_host(self) -> Coefficients:
        """Copy all to host memory, with marks of its own. The host waits for the device."""
        found_inf, used = self.found_inf.cpu(), self.used.cpu()
        updates = bool(found_inf == 0)
        return Coefficients(
            {rule: table.cpu() for rule, table in self.hyper.items()},
            None if self.grad_scale is None else self.grad_scale.cpu(),
            found_inf,
            torch.zeros_like(self.marks, device="cpu"),
            used,
            updates=updates,
            writes_all=updates and bool(used.all()),
            rates=None if self.rates is None else self.rates.cpu(),
        )


class Workplace(Protocol):
    """Brings together what the update of one shard needs."""

    def prefetch(self) -> None:
        """Start copies: the update will follow soon."""

    def gradient(self) -> Tensor:
        """[shard_numel] the reduced gradient."""

    def parameters(self, state: Mapping[str, Tensor], by: Coefficients) -> Tensor:
        """[shard_numel] the parameters, to be written; with their values, unless the update writes all of them."""

    def updated(self) -> None:
        """Send the parameters to the device: the update has been launched."""

    def release(self) -> None: ...


class OnDevice:
    """Updates on the device: everything is there, or visits with the page."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def prefetch(self) -> None: ...

    def gradient(self) -> Tensor:
        return self._bucket.gradient_to_apply()

    def parameters(self, state: Mapping[str, Tensor], by: Coefficients) -> Tensor:
        return state.get(PARAMETER, self._bucket.param_shard)

    def updated(self) -> None: ...

    def release(self) -> None: ...


@dataclass(frozen=True, eq=False)
class Taken:
    """The gradient that the host has: the tensor that it was copied from, and the count of writes into that."""

    source: Tensor
    written: tuple[int, int]


class OnHost:
    """Updates on the host: gradients are copied there as reductions arrive, during backward, and parameters back.

    Args:
        reads_parameters: whether the update reads them: they have no master.
    """

    def __init__(self, bucket: Bucket, store: HostStore, *, reads_parameters: bool) -> None:
        self._bucket, self._store, self._reads_parameters = bucket, store, reads_parameters
        memory, lanes = store.memory, store.lanes
        numel = bucket.layout.shard_numel
        self._grad_run = memory.take(numel * bucket.grad_shard.element_size())
        self._grad = self._grad_run.view(bucket.grad_shard.dtype)
        self._param_run = None if bucket.flat.offloaded else memory.take(numel * bucket.dtype.itemsize)
        self._param = None if self._param_run is None else self._param_run.view(bucket.dtype).zero_()
        self._taken, self._brought, self._sent = lanes.mark(), lanes.mark(), lanes.mark()
        self._now = lanes.mark()
        self._has: Taken | None = None  # None: nothing, or what is outdated
        # At stage 0, and alone, the user may edit gradients up to the step. So none is taken before that.
        self._users_may_edit = bucket.sharding.stage == 0 or not bucket.sharding.reduces
        if not self._users_may_edit:
            bucket.follower = self

    def release(self) -> None:
        self._bucket.follower = None
        for mark in (self._taken, self._brought, self._sent):
            mark.wait()
        for run in (self._grad_run, self._param_run):
            if run is not None:
                self._store.memory.give_back(run)

    # -- the gradient --------------------------------------------------------------------------------------------

    def reduction_begins(self) -> None:
        self._has = None

    def reduction_launched(self, pending: Pending | Chain) -> bool:
        with self._store.lanes.to_host.as_current():
            ordered = pending.order_current()
        if ordered:
            self._take()
        return ordered

    def reduction_arrived(self) -> None:
        self._take_from_current()
        self.after_taking()

    def after_taking(self) -> None:
        self._taken.order_current()

    def _take_from_current(self) -> None:
        self._now.set()
        self._store.lanes.to_host.after(self._now)
        self._take()

    def _take(self) -> None:
        source, lane = self._bucket.grad_shard, self._store.lanes.to_host
        lane.copy(self._grad, source)
        lane.set(self._taken)
        self._store.copied.to_host += source.nbytes
        self._has = Taken(source, self._written())

    def prefetch(self) -> None:
        has, source = self._has, self._bucket.gradient_to_apply()
        current = has is not None and has.source is source and has.written == self._written()
        if self._users_may_edit or not current:
            self._take_from_current()
        if self._reads_parameters:
            self._bring_parameters()

    def _written(self) -> tuple[int, int]:
        """Count how often the gradient was written. A ``zero_`` of what ``.grad`` shows counts no version up: it runs
        within the tensor subclass, where torch does not."""
        return self._bucket.grad_shard._version, self._bucket.arrivals.zeroed

    def gradient(self) -> Tensor:
        self._taken.wait()
        return self._grad

    # -- the parameters ------------------------------------------------------------------------------------------

    def _bring_parameters(self) -> None:
        if self._param is not None:
            self._sent.wait()
            self._now.set()
            lane = self._store.lanes.to_host
            lane.after(self._now)
            lane.copy(self._param, self._bucket.param_shard)
            lane.set(self._brought)
            self._store.copied.to_host += self._param.nbytes

    def parameters(self, state: Mapping[str, Tensor], by: Coefficients) -> Tensor:
        self._bucket.flat.wait_until_copied()
        if self._param is None:
            return self._bucket.param_shard
        if not by.writes_all and not self._reads_parameters:
            self._bring_parameters()
        self._brought.wait()
        self._sent.wait()
        return self._param

    def updated(self) -> None:
        if self._param is None:
            return
        lanes = self._store.lanes
        self._now.set()
        lanes.to_device.after(self._now)
        lanes.to_device.copy(self._bucket.param_shard, self._param)
        lanes.to_device.set(self._sent)
        self._sent.order_current()
        self._store.copied.to_device += self._param.nbytes


# -- the parameters that an update joins -------------------------------------------------------------------------------


Group = Callable[[int], Mapping[str, Any]]
"""Gives the parameter group of a parameter, by its index."""


def joins_shards(bucket: Bucket, rule: UpdateRule) -> bool:
    """Whether updates join parameters that are cut over the ranks of the shard group."""
    # A rank alone has whole parameters, in host memory perhaps, where they count as sharded, too.
    return not rule.layout.cuts and bucket.flat.sharded and bucket.sharding.shard_count > 1


def wholes_in(bucket: Bucket, rule: UpdateRule, group: Group) -> tuple[Whole, ...]:
    """List the parameters in this rank's shard that ``rule`` has whole, or a slice of each."""
    if rule.layout.cuts or joins_shards(bucket, rule):
        return ()
    shard, numel = bucket.sharding.shard_index, bucket.layout.shard_numel
    return tuple(
        whole._replace(start=piece.in_shard)
        for piece, whole in zip(bucket.pieces, _from_zero(bucket, group), strict=True)
        # A slice may be empty here, and have elements on other tensor-parallel ranks, at the same place.
        if piece.numel or (_is_joined(rule, whole.joint) and piece.slot.offset // numel == shard)
    )


def to_join(
    bucket: Bucket, rule: UpdateRule, wholes: Sequence[Whole], group: Group, *, keeps_views: bool
) -> ToJoin | None:
    """List the parameters that an update makes whole over ranks, or whose work replicas divide; None: there are none.

    Args:
        wholes: those of ``wholes_in``.
        keeps_views: whether state stays on the device. Else replicas divide no work alone: pages would come twice, and
            state on the host would go to the device and back.
    """
    sharding, cut = bucket.sharding, joins_shards(bucket, rule)
    # Alike on all tensor-parallel ranks, which have slices of the same parameters.
    sliced = not rule.layout.cuts and any(_is_joined(rule, joint) for joint in _joints(bucket))
    replicas = sharding.replicas if rule.shares_work and (cut or sliced or keeps_views) else None
    if not cut and not sliced and replicas is None:
        return None
    cuts: tuple[CutParameter, ...] = ()
    if cut:
        slots = zip(bucket.layout.slots, _from_zero(bucket, group), strict=True)
        cuts = tuple(CutParameter(whole, tuple(bucket.layout.parts(slot))) for slot, whole in slots)
    slices = sharding.tensor_ranks.slices if sharding.tensor_ranks is not None and sliced else None
    return ToJoin(wholes, cuts, sharding.sharers if cut else None, slices, replicas)


def _from_zero(bucket: Bucket, group: Group) -> Iterator[Whole]:
    """The parameters of the bucket, each as if it began a shard."""
    flat, slots = bucket.flat, bucket.layout.slots
    for slot, local, order, joint in zip(slots, flat.locals, flat.orders, _joints(bucket), strict=True):
        yield Whole(slot.param, 0, local.shape, order, group(slot.param), joint)


def _joints(bucket: Bucket) -> list[Joint | None]:
    """Read, for each parameter of the bucket, how its slices make a whole."""
    return [joint_of(parameter, bucket.sharding.plain_slices) for parameter in bucket.params]


def _is_joined(rule: UpdateRule, joint: Joint | None) -> bool:
    """Whether the rule needs all slices of such a parameter."""
    return joint is not None and rule.needs_whole(joint)


# -- batches -----------------------------------------------------------------------------------------------------------


class Prefetched(Holder, Protocol):
    def prefetch(self) -> None: ...


T = TypeVar("T", bound=Prefetched)
Done = TypeVar("Done")


def in_turn(things: Sequence[T], ahead: int, lost: LostState) -> Iterator[T]:
    """Yield ``things`` in order, each when the ``ahead`` that follow it have been prefetched. 0: none ever is.

    ``lost``: records state that is lost on the way.
    """
    for number in range(-ahead, len(things)):
        for later in things[number + ahead : number + ahead + 1] if ahead else ():
            with lost.recording(later):
                later.prefetch()
        if number >= 0:
            yield things[number]


class ShardBatch:
    """Shards that are updated together, or one alone.

    Args:
        lost: records state that is lost on the way.
    """

    def __init__(self, shards: Sequence[ShardState], lost: LostState) -> None:
        self.shards = shards
        self._lost, self._rule = lost, shards[0].rule.prepared()

    @property
    def parameters(self) -> list[int]:
        """Indices of its parameters."""
        return [index for shard in self.shards for index in shard.parameters]

    def prefetch(self) -> None:
        """Prefetch all shards: ``update`` will follow soon."""
        for shard in self.shards:
            shard.prefetch()

    def update(self, by: Coefficients) -> None:
        """One fused pass: unscale, clip, update, cast into the buckets' parameters. See ``ShardUpdate``."""
        updates: list[ShardUpdate] = []
        with self._lost.recording(self):
            try:
                for shard in self.shards:
                    updates.append(shard.begin_update(by))
                with span("step.update", self.shards[0].bucket):
                    self._rule.update(updates)
            except BaseException:
                for shard in self.shards[: len(updates)]:
                    shard.give_up_update()
                raise
            for shard in self.shards:
                shard.end_update()


class JoinedBatch(ShardBatch):
    """Shards whose parameters are made whole together, each on one rank. Collective: a rank that cannot read a page
    goes on with zeros in its place, and all ranks raise in the next step."""

    def __init__(self, shards: Sequence[ShardState], lost: LostState) -> None:
        super().__init__(shards, lost)
        self._to_join = [shard.to_join for shard in shards if shard.to_join is not None]

    def prefetch(self) -> None:
        """Do nothing: pages are fetched one by one within ``update``."""

    def update(self, by: Coefficients) -> None:
        rule = self._rule
        begun = [self._pass(shard, by, rule.before_joining, shard.end_pass) for shard in self._in_turn()]
        held = [_on_device(shard, tensor) for shard, tensor in zip(self.shards, begun, strict=True)]
        with span("step.join", self.shards[0].bucket):
            rule.join(held, self._to_join)
        for shard, to_join, tensor, before in zip(self._in_turn(), self._to_join, held, begun, strict=True):
            if before is not None:
                after = partial(rule.after_joining, to_join=to_join, joined=tensor.to(shard.device))
                self._pass(shard, by, after, shard.end_update)

    def _in_turn(self) -> Iterator[ShardState]:
        return in_turn(self.shards, self.shards[0].lookahead, self._lost)

    def _pass(
        self, shard: ShardState, by: Coefficients, do: Callable[[ShardUpdate], Done], end: Callable[[], None]
    ) -> Done | None:
        """Fetch a shard's page for a pass, ``do`` it and ``end`` it. None: the page is lost."""
        with self._lost.recording(shard):
            update = shard.begin_update(by)
            try:
                done = do(update)
            except BaseException:
                shard.give_up_update()
                raise
            end()
            return done
        return None


def _on_device(shard: ShardState, tensor: Tensor | None) -> Tensor:
    """Bring a shard's ``tensor`` to where ranks exchange it; zeros where it was lost (None), so that none waits."""
    device = shard.bucket.sharding.device
    if tensor is None:
        return torch.zeros(shard.numel, dtype=shard.rule.joined_in, device=device)
    return tensor.to(device)


def batches_of(shards: Sequence[ShardState], lost: LostState) -> list[ShardBatch]:
    """Cut ``shards`` into batches: first the shards to join, then the others in their order."""
    joining = [shard for shard in shards if shard.to_join is not None]
    others = [shard for shard in shards if shard.to_join is None]
    joined = (part for alike in _alike(joining) for part in _parts(alike))
    return [
        *(JoinedBatch(batch, lost) for batch in joined),
        *(ShardBatch(batch, lost) for batch in _neighbours(others)),
    ]


def _alike(shards: Sequence[ShardState]) -> list[list[ShardState]]:
    """Group the shards that can be joined together, wherever they are."""
    found: list[list[ShardState]] = []
    for shard in shards:
        batch = next((batch for batch in found if shard.is_joined_like(batch[0])), None)
        if batch is None:
            found.append([shard])
        else:
            batch.append(shard)
    return found


def _parts(shards: Sequence[ShardState]) -> Iterator[list[ShardState]]:
    """Cut shards to join into batches. Below stage 3 a shard has only some of its bucket's parameters."""
    first, bucket = shards[0], shards[0].bucket
    of_parts, of_slices, _ = first.joining  # with more parameters for replicas a batch would take more memory
    ranks = prod(ranks.world_size for ranks in (of_parts, of_slices) if ranks is not None)
    shares = bucket.layout.shards if first.joining[0] is None else 1
    sizes = [Size(shard.numel, len(shard.parameters)) for shard in shards]
    rest = iter(shards)
    for length in batch_lengths(sizes, ranks * shares, bucket.sharding.device):
        yield [*islice(rest, length)]


def _neighbours(shards: Sequence[ShardState]) -> list[list[ShardState]]:
    batches: list[list[ShardState]] = []
    numel = 0
    for shard in shards:
        numel += shard.numel
        most = ON_A_PROCESSOR if shard.device.type == "cpu" else ON_A_GPU
        together = batches and shard.is_updated_like(batches[-1][-1]) and numel <= most
        if together:
            batches[-1].append(shard)
        else:
            batches.append([shard])
            numel = shard.numel
    return batches
