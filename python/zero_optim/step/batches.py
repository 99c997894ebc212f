"""Batches: shards that one call of the rule updates; and the record of state that was lost.

A call costs the host time, and a launch costs a GPU time, however few elements are updated. Where many ranks shard a
bucket that is longer than the update itself. But the parameters of a shard are sent out only when its update has been
launched. So a batch has small neighbours, alike in rule and dtypes, and no more elements than are updated in about the
time of a call.

Where an update joins parameters that are cut over ranks, a batch has a least number of parameters a rank, so that all
ranks have about as much to do, and of elements, so that no message is small. It is not much larger either, since
messages take memory. Its pages are fetched twice: before the parameters are joined, and after.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from math import prod
from typing import TypeVar

import torch
from torch import Tensor

from zero_kernels import codecs

from ..comm.spans import span
from ..errors import OffloadError
from ..rules.homes import Size, batch_lengths
from ..rules.update_rule import ShardUpdate, UpdateRule, masters_of
from ..stores.disk_pages import DiskBacking
from .exchange import to_device
from .shard_state import ShardState
from .workplace import Coefficients

ON_A_GPU, ON_A_PROCESSOR = 2**22, 2**16
"""Elements of a batch, at most. By the bytes that it moves, such an update takes some 30 µs on an H200. Nobody has
measured that. On two threads of a processor 2^20 elements took 290 µs, so 2^16 take some 20."""


# -- state that an I/O error has lost ----------------------------------------------------------------------------------


class LostState:
    """The record of what this rank has lost. It is never cleared: only a new optimizer has whole state.

    Within a step other ranks wait for this one in a collective. So it records an error there instead of raising it, and
    all ranks raise in the next exchange, and in each one after it.

    ``every``: all trained parameters, by index. ``disk``: that on which they rest; None: they are on none.

    Attributes:
        parameters: indices of the parameters whose state is lost.
        reasons: the errors, in words.
    """

    def __init__(self, every: Mapping[int, Tensor] | None = None, disk: DiskBacking | None = None) -> None:
        self._every, self._disk = {} if every is None else every, disk
        self.parameters: set[int] = set()
        self.reasons: list[str] = []

    def look(self) -> None:
        """Take in what a forward or backward has recorded of a disk that the parameters are on."""
        if self._disk is not None and self._disk.failure is not None:
            self.parameters |= {*self._every}
            self.reasons = [*dict.fromkeys([*self.reasons, self._disk.failure])]

    def recording(self, of: ShardState | ShardBatch, *, raises: bool = False) -> _Recording:
        """Make a context that records an OffloadError within it as a loss of these parameters' state."""
        return _Recording(self, of, raises)

    @contextmanager
    def opened(self, shard: ShardState) -> Iterator[Mapping[str, Tensor]]:
        """Open ``shard``. An OffloadError is recorded, and raised."""
        with self.recording(shard, raises=True), shard.opened() as state:
            yield state

    def check(self) -> None:
        """Raise OffloadError where state is lost."""
        self.look()
        if self.parameters:
            raise OffloadError("; ".join(self.reasons))


class _Recording:
    """See ``LostState.recording``. A class adds no frame between ``step`` and an update's kernel."""

    def __init__(self, lost: LostState, of: ShardState | ShardBatch, raises: bool) -> None:
        self._lost, self._of, self._raises = lost, of, raises

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        if not isinstance(error, OffloadError):
            return False
        self._lost.parameters |= set(self._of.parameters)
        if str(error) not in self._lost.reasons:
            self._lost.reasons.append(str(error))
            warnings.warn(f"{error}. The next step will raise, on every rank", stacklevel=2)
        return not self._raises


# -- batches -----------------------------------------------------------------------------------------------------------


T = TypeVar("T", "ShardState", "ShardBatch")


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
                before = [_master(self._rule, of, copy=True) for of in updates] if by.measures else []
                with span("step.update", self.shards[0].bucket):
                    self._rule.update(updates)
                    if by.rates is not None:
                        self._rule.follow(updates, by.rates)
                for shard, update, old in zip(self.shards, updates, before, strict=False):  # none if not measured
                    shard.numbers = measured(self._rule, shard, update, old)
            except BaseException:
                # A store lets two pages be fetched at a time: none may stay so after an error.
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
        rule, bucket = self._rule, self.shards[0].bucket
        device, ahead = bucket.sharding.device, self.shards[0].lookahead
        begun: dict[int, Tensor] = {}
        for number, shard in enumerate(in_turn(self.shards, ahead, self._lost)):
            with self._lost.recording(shard):
                with _begun(shard, by) as update:
                    to_send = rule.before_joining(update)
                shard.end_pass()
                begun[number] = to_send.to(device)
        # Where a page is lost zeros go to the other ranks, which wait in the collective.
        held = [
            begun[number] if number in begun else torch.zeros(shard.numel, dtype=rule.joined_in, device=device)
            for number, shard in enumerate(self.shards)
        ]
        with span("step.join", bucket):
            rule.join(held, self._to_join)
        for number, shard in enumerate(in_turn(self.shards, ahead, self._lost)):
            if number in begun:
                with self._lost.recording(shard):
                    with _begun(shard, by) as update:
                        before = [_master(rule, update, copy=True)] if by.measures else []
                        rule.after_joining(update, self._to_join[number], held[number].to(shard.device))
                        if by.rates is not None:
                            rule.follow([update], by.rates)
                        for old in before:
                            shard.numbers = measured(rule, shard, update, old)
                    shard.end_update()


@contextmanager
def _begun(shard: ShardState, by: Coefficients) -> Iterator[ShardUpdate]:
    update = shard.begin_update(by)
    try:
        yield update
    except BaseException:
        shard.give_up_update()
        raise


# -- telemetry ---------------------------------------------------------------------------------------------------------


def measured(rule: UpdateRule, shard: ShardState, update: ShardUpdate, before: Tensor) -> Tensor:
    """Measure an update, from a copy of the masters before it, which is overwritten.

    Returns [parameters in the shard, 6] float64: the 2-norms of gradient, change and master; the largest change;
    elements of the gradient that are not 0; elements.
    """
    pieces = [piece for piece in shard.bucket.pieces if piece.numel]
    if not pieces:
        return torch.zeros(0, 6, dtype=torch.float64, device=shard.device)
    master = _master(rule, update)
    change = torch.sub(master, before, out=before)
    grads, changes, masters = (
        [flat.narrow(0, piece.in_shard, piece.numel) for piece in pieces] for flat in (update.grad, change, master)
    )
    params = to_device(shard.device, [piece.slot.param for piece in pieces], torch.int64)
    scale = update.hyper[:, rule.columns.index("grad_factor")].index_select(0, params).abs()
    if update.grad_scale is not None:
        scale = scale * update.grad_scale.abs()
    columns = (_norms(grads) * scale, _norms(changes), _norms(masters), _norms(changes, math.inf), _norms(grads, 0))
    numels = to_device(shard.device, [piece.numel for piece in pieces], torch.float64)
    return torch.stack([*columns, numels], dim=1)


def _master(rule: UpdateRule, update: ShardUpdate, *, copy: bool = False) -> Tensor:
    """[shard_numel] fp32: the master itself where it is one tensor in fp32, unless ``copy``."""
    (master,), high = masters_of(rule, [update])
    return codecs.join_master(high[0], master) if high else master.to(torch.float32, copy=copy)


def _norms(tensors: Sequence[Tensor], ord: float = 2.0) -> Tensor:
    """[tensors] float64."""
    return torch.stack(torch._foreach_norm([*tensors], ord, dtype=torch.float64))


def batches_of(shards: Sequence[ShardState], lost: LostState) -> list[ShardBatch]:
    """Cut ``shards`` into batches: first the shards to join, alike ones together, then the others in their order."""
    joining: dict[object, list[ShardState]] = {}
    others: list[list[ShardState]] = []
    numel = 0  # of the last of these
    for shard in shards:
        if shard.to_join is not None:
            joining.setdefault(shard.kind, []).append(shard)
            continue
        numel += shard.numel
        most = ON_A_PROCESSOR if shard.device.type == "cpu" else ON_A_GPU
        # Pages that move are fetched one by one.
        if others and shard.keeps_views and shard.kind == others[-1][-1].kind and numel <= most:
            others[-1].append(shard)
        else:
            others.append([shard])
            numel = shard.numel
    joined: list[ShardBatch] = []
    for alike in joining.values():
        bucket, to_join = alike[0].bucket, alike[0].to_join
        assert to_join is not None
        # Replicas divide the work, too; but with more parameters for them a batch would take more memory.
        ranks = prod(ranks.world_size for ranks in (to_join.ranks, to_join.slices) if ranks is not None)
        # Below stage 3 a shard has only some of its bucket's parameters.
        shards_of = bucket.layout.shards if to_join.ranks is None else 1
        sizes = [Size(shard.numel, len(shard.parameters)) for shard in alike]
        rest = iter(alike)
        for length in batch_lengths(sizes, ranks * shards_of, bucket.sharding.device):
            joined.append(JoinedBatch([*islice(rest, length)], lost))
    return [*joined, *(ShardBatch(batch, lost) for batch in others)]
