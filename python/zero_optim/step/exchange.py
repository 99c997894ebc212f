"""Phase 2 of a step: what all ranks must know of the gradients, in one small all-reduce.

An exchange describes the gradients as they were then. The state says what is known of the gradients as they are:

==============  ==========  ==========  ==========
event           OUTDATED    USED        COUNTED
==============  ==========  ==========  ==========
run             USED        USED        USED
run: stats      COUNTED     COUNTED     COUNTED
run: raises     OUTDATED    OUTDATED    OUTDATED
follow_edits    OUTDATED    USED        COUNTED
outdate         OUTDATED    OUTDATED    OUTDATED
resize          OUTDATED    OUTDATED    OUTDATED
==============  ==========  ==========  ==========

- *run: stats*: non-finite values were counted, too. *run: raises*: an alarm was raised.
- *outdate*: gradients come, or may have come on some rank; or the step is over, or they were dropped.

``exchange_vector`` has what is sent, ``alarms`` what a step fails for, ``clip`` what the norm is used for.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.sharding import Sharding
from ..comm.streams import keep_tensors_of
from ..grads.bucket import Bucket
from ..grads.slots import GradState
from .alarms import About, Alarm, alarms
from .exchange_vector import ExchangeVector, OwnUse
from .nonfinite import NonFinite
from .pipeline import Pipeline


class Exchanged(enum.Enum):
    """Knowledge of the gradients as they are."""

    OUTDATED = enum.auto()  # nothing
    USED = enum.auto()  # which parameters are used, on any rank
    COUNTED = enum.auto()  # and how many values are not finite


class Exchange:
    """Norm, overflow and use of the gradients of one step, as device tensors.

    Attributes:
        state: which of the values below are those of the gradients as they are.
        norm_type: of the norm that was exchanged; None: no norm was.
        used: [parameters] bool, whether any rank that has the parameter has a gradient for it.
        found_inf: [1] fp32, not 0 where the step must be skipped on every rank.
        skipped: [] fp32, steps skipped so far.
        nonfinite: the record of who was not finite.
    """

    def __init__(
        self,
        sharding: Sharding,
        labels: Sequence[str],
        parameters: Mapping[int, Tensor],
        *,
        by_units: bool,
        at_once: bool = False,
        pipeline: Pipeline | None = None,
        places: Callable[[int], tuple[int, int]] = lambda index: (1, 0),
    ) -> None:
        """
        Args:
            at_once: whether the host waits for every exchange, so that all ranks raise alarms in the same step.
            pipeline: the other stages of the model; None: there are none.
            places: for a parameter's index, the number of parameters with it on all ranks together, and the number of
                this rank's among them. Ranks may have different experts under one index.
        """
        self.sharding, self.labels, self._parameters, self._at_once = sharding, labels, parameters, at_once
        self._pipeline, self._places = pipeline, places
        device = sharding.device
        self._alarms = alarms(by_units=by_units) if sharding.agrees else ()  # alone, a rank has none
        self.nonfinite = NonFinite(sharding.everyone.rank, sharding.everyone.world_size, device)
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        self.state = Exchanged.OUTDATED
        self.norm_type: float | None = None
        self._edited: set[int] = set()  # parameters, since the last exchange
        self._raised: Alarm | None = None  # known on this rank; raised in the next step, when the other ranks know it
        self._own_reasons: Mapping[str, Sequence[str]] = {}  # by alarm, of the last exchange
        self._own_totals, self._totals_of_all = torch.zeros(2, 2, dtype=torch.float32, device=sharding.device)
        self._make_room()

    def _make_room(self) -> None:
        device, count = self.sharding.device, len(self.labels)
        self.used = torch.zeros(count, dtype=torch.bool, device=device)
        self.nonfinite.resize(count)
        places = [self._places(index) for index in range(count)]
        self._vector = ExchangeVector(self._alarms, places, self.nonfinite.entries, device)
        self._own_use = OwnUse(count, device)

    def resize(self) -> None:
        """Make room for as many parameters as there are labels."""
        self.outdate()
        for holder in (self, self._vector, self._own_use):  # kernels of another stream may still use what they had
            keep_tensors_of(holder)
        self._make_room()

    def knows(self, *, stats: bool) -> bool:
        """True if the present gradients were exchanged; ``stats``: and their non-finite values counted."""
        return self.state is Exchanged.COUNTED or (self.state is Exchanged.USED and not stats)

    def outdate(self) -> None:
        """Note, on all ranks alike, that gradients change or have gone: the last exchange no longer describes them."""
        self.state = Exchanged.OUTDATED

    def follow_edits(self, dropped: Set[int], written: Set[int]) -> None:
        """Note the gradients, by parameter index, that the user has dropped or written since they were exchanged.

        Parameters of dropped ones are unused on this rank. The next exchange tells whether all ranks have edited.
        """
        for index in dropped:
            self.used[index].fill_(False)
        self._edited |= dropped | written

    @property
    def total(self) -> Tensor:
        """[] fp32: the sum of |g|^p of all gradients, or their largest; of the ``norm_type`` exchanged."""
        return self._vector.totals[0]

    def run(
        self,
        buckets: Sequence[Bucket],
        used: bytearray,
        norm_type: float | None,
        *,
        stats: bool,
        about: Mapping[str, Set[int]],
        order_code: int,
        own: Mapping[str, Sequence[str]],
        flags: tuple[Tensor, Tensor],
    ) -> None:
        """Collective. Fill in the norm and what is used.

        Args:
            used: a byte a parameter, 1 where this rank has a gradient for it.
            norm_type: None: no norm is wanted.
            stats: False: nor is the non-finite count, so that no gradient is read.
            about: by alarm, the parameters that this rank raises it for.
            order_code: what this rank says for the alarm "parted".
            own: by alarm, this rank's reasons in words.
            flags: which slots were not finite as they were packed, and the parameters of the slots.

        Raises the errors of the alarms, on every rank, before anything is updated. On CUDA every rank raises one step
        later, in the same call, and skips the step in between: so the host need not wait for the device. Only a rank
        that has the alarm itself reads at once, since it must know whether to go on: see ``failed``.
        """
        self.check_alarms()
        about, self._edited = {**about, "edited": self._edited}, set()
        vector = self._vector
        if norm_type is not None or stats:
            vector.totals.copy_(self._local_totals(buckets, norm_type or 2.0))
        else:
            vector.totals.zero_()
        vector.alarms.fill({name: len(of) for name, of in about.items()} | {"parted": order_code})
        vector.put_use(self._own_use.on_device(used))
        vector.name(set().union(*about.values()) if self._alarms else ())
        self.nonfinite.report(vector.reports, *flags)
        self.sharding.everyone.exchange(vector.all, maximum=norm_type == math.inf)
        if self._alarms and not is_capturing(self.sharding.device):  # a replayed graph has no host to raise anything
            vector.alarms.send()
            self._own_reasons = own
            if vector.alarms.immediate or self._at_once:
                self.check_alarms()
            elif any(about.values()):
                self._raised = vector.alarms.read_first_raised()
        torch.gt(vector.use(), 0, out=self.used)
        self.state, self.norm_type = Exchanged.COUNTED if stats else Exchanged.USED, norm_type

    def share_with_stages(
        self, norm_type: float | None, *, fresh: bool, stats: bool, inverse_scale: Tensor | None
    ) -> None:
        """Collective over the stages of a pipeline. Make the totals of this stage those of all.

        Args:
            fresh: whether this stage has exchanged since the last call. Another stage may have, where gradients were
                edited: then its count of non-finite values is another, while the norm of the clip stays.
            inverse_scale: the inverse of the loss scale of this step; None: there is none. See ``Pipeline.share``.
        """
        assert self._pipeline is not None
        totals = self._vector.totals
        if fresh:
            self._own_totals.copy_(totals)
        of_all = self._totals_of_all.copy_(self._own_totals) if norm_type is not None or stats else None
        self._pipeline.share(of_all, norm_type, self._vector.alarms.raised_on_device(), inverse_scale)
        if of_all is not None and fresh:
            totals.copy_(of_all)
        elif of_all is not None:
            totals[1:].copy_(of_all[1:])

    @property
    def failed(self) -> bool:
        """True on a rank that has an alarm itself, and knows already that it is raised: the step is skipped."""
        return self._raised is not None

    def check_alarms(self) -> None:
        """Raise the last step's alarm, if any. A GPU's report has arrived; else the host is a step ahead and waits."""
        if not self._alarms or is_capturing(self.sharding.device):
            return
        alarm, self._raised = self._raised or self._vector.alarms.read_first_raised(), None
        if alarm is not None:
            named = self._vector.named()
            names = ", ".join(self.labels[index] for index in named) or "a parameter"
            dtypes = {str(self._parameters[index].dtype) for index in named if index in self._parameters}
            self.outdate()
            raise alarm.error(About(names, self._own_reasons.get(alarm.name, ()), " or ".join(sorted(dtypes))))

    def overflowed(self) -> Tensor:
        """[1] fp32: not 0 where a gradient of any rank is not finite."""
        return (self._vector.totals[1:] > 0).float()

    def decide(self, skip_nonfinite: bool) -> None:
        """Fill in ``found_inf``. A raised alarm always skips the step; a non-finite gradient does if asked."""
        nonfinite = self._vector.totals[1:] if skip_nonfinite else 0.0
        raised = self._vector.alarms.raised_on_device()
        if self._pipeline is not None:
            raised = raised + self._pipeline.failed
        self.found_inf.copy_(raised + nonfinite > 0)
        self.nonfinite.note(self._vector.reports, self.found_inf)

    def _local_totals(self, buckets: Sequence[Bucket], norm_type: float) -> Tensor:
        """[2]: this rank's term of the norm, and its count of non-finite values."""
        # One of the ranks that hold the same gradients counts them.
        held = [bucket for bucket in buckets if bucket.state is not GradState.EMPTY]
        counted = [part for bucket in held for part in bucket.counted()]
        elsewhere = [part for bucket in held for part in bucket.counted_elsewhere()]
        if not counted and not elsewhere:
            return torch.zeros(2, dtype=torch.float32, device=self.sharding.device)
        stats = torch.ops.zero_kernels.grad_stats([*counted, *elsewhere], norm_type)
        if elsewhere:  # the norm has them from another rank; but a value that is not finite here skips the step
            stats[len(counted) :, 0].zero_()
        totals = stats.sum(0)
        if norm_type == math.inf:
            totals[0] = stats[:, 0].max()
        return totals
