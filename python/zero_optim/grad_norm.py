"""Phase 2 of a step: what all ranks must know of the gradients, in one small all-reduce, and the factors from it.

The vector: ``[norm term, non-finite count, alarms ..., used count of each parameter ..., reports of non-finite
gradients ..., at stage 3 one of several codes for what the rank has gathered ...]``. It is summed for finite norms and
maximised for the infinity norm; every part means the same under either.

Alarms: how many gradients are late, and refused; how many ranks have thawed parameters, and leftover gradients, which
only all of them can deal with; and how many have not. The last is found on arrival: more than one code.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from zero_kernels import is_capturing

from .bucket import Bucket, GradState, Sharding
from .errors import GradientError, RankMismatchError
from .host_copy import HostCopy
from .nonfinite import NonFinite
from .reducer import Reducer
from .unit_schedule import ORDER_CODES, UnitSchedule

_HEADER = 9
_QUIET = (0, 0, False, False, True, True, False)  # the alarms of a usual step
_NAMED = 65536  # marks, in its used count, a parameter that an alarm is about; exact in fp32 for 255 ranks at once


class GradNorm:
    """Norm, overflow and use of the gradients of one step, as device tensors.

    Attributes:
        exchanged: whether the values below are those of the gradients as they are. False, alone, leaves the clip.
        used: [parameters] bool, whether any rank has a gradient for it.
        found_inf: [1] fp32, not 0 where the step must be skipped on every rank.
        clip: [1] fp32, multiplies all gradients where ``clipped``.
        factor: [parameters] fp32, multiplies the gradients of each; None: no subset was clipped.
        skipped: [] fp32, steps skipped so far.
        inverse_scale: [1] fp32, multiplies the gradients of the next step; None: they are unscaled.
        scaled: whether a GradScaler takes part in the next step.
    """

    def __init__(self, sharding: Sharding, labels: Sequence[str], schedule: UnitSchedule | None = None) -> None:
        self.sharding, self.labels, self._schedule = sharding, labels, schedule
        device = sharding.device
        self.nonfinite = NonFinite(sharding.comm.rank, sharding.comm.world_size, device)
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        self.clip = torch.ones(1, dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        self._quiet = torch.tensor(_QUIET, dtype=torch.float32, device=device)
        self.inverse_scale: Tensor | None = None
        self.scaled = False
        self.norm_type: float | None = None  # of the norm that was exchanged
        self.with_stats = False  # whether the non-finite count was
        self.factor: Tensor | None = None
        self.reset()
        self.resize()

    def resize(self) -> None:
        """Make room for as many parameters as there are labels. What was clipped stays so."""
        device, count = self.sharding.device, len(self.labels)
        self.exchanged = False
        if self.factor is not None:
            self.factor = torch.cat([self.factor, self.factor.new_ones(count - len(self.factor))])
        self.used = torch.zeros(count, dtype=torch.bool, device=device)
        self.nonfinite.resize(count)
        codes = ORDER_CODES if self._schedule is not None and self.sharding.reduces else 0
        entries = _HEADER + count + self.nonfinite.entries
        self._vector = torch.zeros(entries + codes, dtype=torch.float32, device=device)
        self._used_counts = self._vector[_HEADER : _HEADER + count]
        self._reports = self._vector[_HEADER + count : entries]
        self._codes = self._vector[entries:]
        self._alarms = _Alarms(self._vector[2:_HEADER], self.sharding.reduces)
        self._used_here = torch.zeros(count, dtype=torch.float32, device=device)  # [parameters] as last sent there
        self._used_sent = bytearray(count)
        self._subsets: dict[tuple[int, ...], Tensor] = {}

    def reset(self) -> None:
        """Forget what was exchanged, and what was clipped."""
        self.exchanged = self.clipped = False
        self.factor = None

    def discard(self) -> None:
        """A backward begins: what was exchanged is no longer what the gradients are."""
        if self.clipped:
            warnings.warn(
                "a backward after clip_grad_norm_ discards its coefficient: call it after the last backward of a step",
                stacklevel=2,
            )
        self.reset()

    def exchange(
        self, reducer: Reducer, used: bytearray, norm_type: float | None, *, stats: bool, thawed: Sequence[int]
    ) -> None:
        """Fill in the norm and what is used.

        Args:
            used: a byte a parameter.
            norm_type: None: no norm is wanted.
            stats: False: nor is the non-finite count, so that no gradient is read.
            thawed: parameters that this rank is to train from now on.

        Raises GradientError, on every rank, where any rank has a late or refused gradient, or only some have leftover
        ones; RankMismatchError where some thawed and others did not. On CUDA, where this rank has no part in it, one
        step later.
        """
        self.check_alarms()
        maximum = norm_type == math.inf
        wanted = norm_type is not None or stats
        self._vector[:2] = self._local_totals(reducer.buckets, norm_type or 2.0) if wanted else 0.0
        refused, leftover = reducer.refused, reducer.leftover
        alarms = (len(reducer.late), len(refused), bool(thawed), bool(leftover), not thawed, not leftover, False)
        if alarms == _QUIET:
            self._vector[2:_HEADER].copy_(self._quiet)
        else:
            for place, alarm in enumerate(alarms, 2):
                self._vector[place].fill_(alarm)
        self._used_counts.copy_(self._on_device(used))
        for index in {*reducer.late, *refused, *thawed, *leftover}:
            self._used_counts[index].add_(_NAMED)
        self.nonfinite.report(self._reports, reducer.nonfinite, reducer.slot_params)
        if self._schedule is not None and len(self._codes):
            self._codes.zero_()
            self._codes[self._schedule.order_code].fill_(1)
        self.sharding.comm.exchange(self._vector, maximum=maximum)
        if len(self._codes):
            self._vector[_HEADER - 1] = (self._codes > 0).sum() > 1
        own = partial(self._raise_alarm, reducer)
        self._alarms.check_this(own, now=bool(reducer.late or refused or thawed or leftover))
        torch.gt(self._used_counts, 0, out=self.used)
        self.exchanged, self.norm_type, self.with_stats = True, norm_type, stats

    def check_alarms(self) -> None:
        """Raise what a GPU has reported of the last step."""
        self._alarms.check_last(partial(self._raise_alarm, None))

    def _on_device(self, used: bytearray) -> Tensor:
        """``used`` as fp32 on the device, [parameters]. As a rule it is that of the step before, and is there."""
        if is_capturing(self._used_here.device):
            # A copy from the host would read, at every replay, memory that is long gone: the values go into kernels.
            flags = torch.ones_like(self._used_here)
            for index in (index for index, flag in enumerate(used) if not flag):
                flags[index].zero_()
            return flags
        if used != self._used_sent:
            host = torch.frombuffer(used, dtype=torch.uint8).float()
            self._used_here.copy_(host.pin_memory() if self._used_here.is_cuda else host, non_blocking=True)
            self._used_sent = bytearray(used)
        return self._used_here

    def overflowed(self) -> Tensor:
        """[1] fp32: not 0 where a gradient of any rank is not finite."""
        return (self._vector[1:2] > 0).float()

    def decide(self, skip_nonfinite: bool) -> None:
        """Fill in found_inf. What an alarm is raised for always skips; a non-finite gradient if asked."""
        nonfinite = self._vector[1:2] if skip_nonfinite else 0.0
        late, refused, thawed, leftover, unthawed, unleft, parted = self._vector[2:_HEADER].split(1)
        self.found_inf.copy_(late + refused + thawed * unthawed + leftover * unleft + parted + nonfinite > 0)
        self.nonfinite.note(self._reports, self.found_inf)

    def _local_totals(self, buckets: Sequence[Bucket], norm_type: float) -> Tensor:
        """[2]: this rank's term of the norm, and its count of non-finite values."""
        shards = [bucket.grad_shard for bucket in buckets if bucket.state is not GradState.EMPTY]
        if not shards:
            return torch.zeros(2, dtype=torch.float32, device=self.sharding.device)
        stats = torch.ops.zero_kernels.grad_stats(shards, norm_type)
        totals = stats.sum(0)
        if norm_type == math.inf:
            totals[0] = stats[:, 0].max()
        return self._once(totals)

    def _once(self, totals: Tensor) -> Tensor:
        """Where every rank holds the same gradients, rank 0 speaks for all."""
        return totals.zero_() if self.sharding.shards == 1 and self.sharding.comm.rank > 0 else totals

    # -- clipping ------------------------------------------------------------------------------------------------

    def clip_to(
        self,
        max_norm: float,
        norm_type: float,
        buckets: Sequence[Bucket],
        subset: Sequence[int] | None,
        inverse_scale: Tensor | None,
    ) -> Tensor:
        """Clip all gradients, or those of ``subset``, as torch's ``clip_grad_norm_`` does. They were exchanged.

        Returns their norm before it, with what was clipped before, unscaled if ``inverse_scale`` is given. [] fp32.
        """
        if not self.clipped:
            self.clip.fill_(1.0)
        if subset is None and self.factor is None and norm_type == self.norm_type:
            norm = _root(self._vector[0], norm_type)
        else:
            norm = self._norm_of(buckets, norm_type, range(len(self.labels)) if subset is None else subset)
        norm = norm * self.clip.reshape(())
        if inverse_scale is not None:
            norm = norm * inverse_scale.reshape(())
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        if subset is None:
            self.clip.mul_(coefficient)
        else:
            self.factor = self._factors() * torch.where(self._mask(subset), coefficient, 1.0)
        self.clipped = True
        return norm

    def _factors(self) -> Tensor:
        return self.used.new_ones(len(self.labels), dtype=torch.float32) if self.factor is None else self.factor

    def _norm_of(self, buckets: Sequence[Bucket], norm_type: float, indices: Sequence[int]) -> Tensor:
        """The norm of some parameters' gradients, each times its factor; [] fp32. An exchange of its own."""
        wanted = set(indices)
        pieces = [
            (bucket.grad_shard.narrow(0, piece.in_shard, piece.numel), piece.slot.param)
            for bucket in buckets
            if bucket.state is not GradState.EMPTY
            for piece in bucket.pieces
            if piece.slot.param in wanted and piece.numel
        ]
        term = torch.zeros(1, dtype=torch.float32, device=self.sharding.device)
        if pieces:
            terms = torch.ops.zero_kernels.grad_stats([piece for piece, _ in pieces], norm_type)[:, 0]
            if self.factor is not None:
                factors = self.factor.index_select(0, self._to_device([index for _, index in pieces]))
                terms = terms * (factors if norm_type == math.inf else factors**norm_type)
            term = self._once((terms.amax() if norm_type == math.inf else terms.sum()).reshape(1))
        self.sharding.comm.exchange(term, maximum=norm_type == math.inf)
        return _root(term[0], norm_type)

    def _mask(self, subset: Sequence[int]) -> Tensor:
        """[parameters] bool, True in ``subset``."""
        key = tuple(subset)
        if key not in self._subsets:
            members = set(subset)
            mask = self._to_device([index in members for index in range(len(self.labels))])
            self._subsets = {**self._subsets, key: mask} if len(self._subsets) < 64 else {key: mask}
        return self._subsets[key]

    def _to_device(self, values: Sequence[int]) -> Tensor:
        host = torch.tensor(values, device="cpu")
        return host.pin_memory().to(self.sharding.device, non_blocking=True) if self.used.is_cuda else host

    # -- errors --------------------------------------------------------------------------------------------------

    def _raise_alarm(self, reducer: Reducer | None, alarm: str) -> None:
        named = [index for index, count in enumerate(self._used_counts.tolist()) if count >= _NAMED]
        names = ", ".join(self.labels[index] for index in named) or "a parameter"
        self.reset()
        if alarm == "thawed":
            raise RankMismatchError(
                f"{names} is frozen, with no gradient, on some ranks, and requires or has one on others: call "
                "requires_grad_() on every rank before the same step. Nothing was updated"
            )
        if alarm == "leftover":
            raise GradientError(
                f"a gradient of {names} was assigned on some ranks, and not on others, after backward had reduced it: "
                "assign it on every rank, or before. Nothing was updated"
            )
        if alarm == "refused":
            of = {} if reducer is None else {index: reducer.parameters[index].dtype for index in named}
            own = [] if reducer is None else list(reducer.refused.values())
            kinds = " or ".join(sorted({str(dtype) for dtype in of.values()}))
            other = f"the gradient of {names} on another rank cannot be used; expected a dense {kinds}"
            raise GradientError("; ".join(own or [other]))
        if alarm == "parted":
            raise RankMismatchError(
                "the ranks have gathered units in different orders, and may have computed with wrong values: each must "
                "run as many forwards and backwards of the sharded model, in the same order. Nothing was updated"
            )
        if self._schedule is not None:
            raise GradientError(
                f"a gradient of {names} arrived after the backward of its unit. Nothing was updated. Gradients "
                "must come into a unit through what its forward returns: tensors in lists, tuples, dicts or dataclasses"
            )
        raise GradientError(
            f"a gradient of {names} arrived after its bucket had been reduced: it became ready more often than in the "
            "backward that was observed. Nothing was updated. Call opt.zero_grad(), and opt.observe() before a "
            "backward that uses parameters another number of times"
        )


def _root(total: Tensor, norm_type: float) -> Tensor:
    return total.clone() if norm_type == math.inf else total.pow(1.0 / norm_type)


class _Alarms:
    """Alarms on the host. A CPU's are read at once; a GPU's, unless this rank is part of it, one step later, at the
    same place on all ranks."""

    def __init__(self, counts: Tensor, reduces: bool) -> None:
        self._device = counts.device
        self._reduces = reduces  # alone, a rank has none
        self._host = HostCopy(counts)

    def check_this(self, fail: Callable[[str], object], *, now: bool) -> None:
        """Right after the exchange."""
        if self._reduces and not is_capturing(self._device):
            self._host.send()
            if now or self._host.immediate:
                self._check(fail)

    def check_last(self, fail: Callable[[str], object]) -> None:
        """In the next step: the copy made in the last one has arrived, or the host is a step ahead and waits for it."""
        if not is_capturing(self._device):
            self._check(fail)

    def _check(self, fail: Callable[[str], object]) -> None:
        late, refused, thawed, leftover, unthawed, unleft, parted = self._host.read(wait=True) or (0.0,) * 7
        alarms = {"parted": parted, "late": late, "refused": refused}
        alarms |= {"thawed": thawed * unthawed, "leftover": leftover * unleft}
        for alarm, count in alarms.items():
            if count > 0:
                fail(alarm)
