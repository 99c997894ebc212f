"""Phase 2 of a step: what all ranks must know of the gradients, in one small all-reduce.

The vector that is exchanged::

    norm term | non-finite count | alarms ... | used count of each parameter ... | alarm count of each parameter ...
    | tokens | reports of non-finite gradients ...

It is summed. A rank adds 0 or 1 to each count: in any order fp32 adds up to 2^24 ranks, and as many tokens, without
rounding.

``alarms`` has the errors that a step raises on every rank, ``clip`` what the norm is used for.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.collectives import Comm
from ..comm.sharding import Sharding
from ..comm.streams import keep_tensors_of
from ..comm.together import check_same
from ..errors import RankMismatchError
from ..grads.bucket import Bucket
from ..grads.slots import GradState
from .alarms import OPTIONS, UNEQUAL, Alarm, AlarmColumns, alarms
from .hyper_table import HyperTable
from .pipeline import Pipeline


class Exchanged(enum.Enum):
    """What is known of the gradients as they are now; the last exchange describes them as they were then.

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
    """

    OUTDATED = enum.auto()  # nothing
    USED = enum.auto()  # which parameters are used, on any rank
    COUNTED = enum.auto()  # and how many values are not finite


@dataclass(frozen=True)
class ToExchange:
    """What this rank brings into an exchange.

    Attributes:
        buckets: all buckets, with their gradients.
        used: a byte a parameter, 1 where this rank has a gradient for it.
        norm_type: of the norm that is wanted, 1 or 2; None: none is.
        stats: whether non-finite values are counted; with neither norm nor count no gradient is read.
        about: by alarm, the parameters that this rank raises it for.
        numbers: by alarm that is about no parameters, this rank's number.
        reasons: by alarm, this rank's reasons in words.
        flags: which slots were not finite as they were packed, and the parameters of the slots.
    """

    buckets: Sequence[Bucket]
    used: bytearray
    norm_type: float | None
    stats: bool
    about: Mapping[str, Set[int]]
    numbers: Mapping[str, int]
    reasons: Mapping[str, Sequence[str]]
    flags: tuple[Tensor, Tensor]
    tokens: Tensor | None = None  # [1] float64; None: this rank has counted none
    terms: Tensor | None = None  # of UNEQUAL; None: this step compares no replicas


class Exchange:
    """Norm, overflow and use of the gradients of one step, as device tensors.

    Attributes:
        state: which of the values below are those of the gradients as they are.
        norm_type: of the norm that was exchanged; None: no norm was.
        totals: [2] fp32, the sum of |g|^p of all gradients, of that type; and the number of values that are not finite.
        used: [parameters] bool, whether any rank that has the parameter has a gradient for it.
        tokens: [1] fp32, those that all ranks have counted.
        found_inf: [1] fp32, not 0 where a gradient or an alarm makes every rank skip the step.
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
        hyper: HyperTable | None = None,
        name_unequal: Callable[[], None] | None = None,
    ) -> None:
        """
        Args:
            at_once: whether the host waits for every exchange, so that all ranks raise alarms in the same step.
            pipeline: the other stages of the model; None: there are none.
            places: for a parameter's index, the number of parameters with it on all ranks together, and the number of
                this rank's among them. Ranks may have different experts under one index.
            hyper: whose options the ranks compare; None: they compare none.
            name_unequal: collective; raises an error that names what replicas differ in; None: no step compares them.
        """
        self.sharding, self.labels, self._parameters, self._at_once = sharding, labels, parameters, at_once
        self._pipeline, self._places, self._hyper, self._name_unequal = pipeline, places, hyper, name_unequal
        device = sharding.device
        more = () if name_unequal is None else (UNEQUAL,)
        self._alarms = (*alarms(by_units=by_units), *more) if sharding.agrees else ()  # alone, a rank has none
        self.nonfinite = NonFinite(sharding.world.rank, sharding.world.world_size, device)
        self.found_inf = torch.zeros(1, dtype=torch.float32, device=device)
        self.skipped = torch.zeros((), dtype=torch.float32, device=device)
        self.state = Exchanged.OUTDATED
        self.norm_type: float | None = None
        self._edited: set[int] = set()  # parameters, since the last exchange
        self._raised: Alarm | None = None  # known on this rank; raised in the next step, when the other ranks know it
        self._own_reasons: Mapping[str, Sequence[str]] = {}  # by alarm, of the last exchange
        self._own_totals = torch.zeros(2, dtype=torch.float32, device=device)  # of this stage of a pipeline
        self._make_room()

    def _make_room(self) -> None:
        device, count = self.sharding.device, len(self.labels)
        self.used = torch.zeros(count, dtype=torch.bool, device=device)
        self.nonfinite.resize(count)
        places = [self._places(index) for index in range(count)]
        self._vector = ExchangeVector(self._alarms, places, self.sharding.world, device)
        self.totals, self.tokens = self._vector.totals, self._vector.tokens

    def resize(self) -> None:
        """Make room for as many parameters as there are labels."""
        self.outdate()
        for holder in (self, self._vector, self._vector.alarms):  # kernels of another stream may still use their memory
            keep_tensors_of(holder)
        self._make_room()

    def knows(self, *, stats: bool) -> bool:
        """True if the present gradients were exchanged; ``stats``: and their non-finite values counted."""
        return self.state is Exchanged.COUNTED or (self.state is Exchanged.USED and not stats)

    def outdate(self) -> None:
        """Record, on all ranks alike, that gradients change or have gone: the last exchange is stale."""
        self.state = Exchanged.OUTDATED

    def follow_edits(self, dropped: Set[int], written: Set[int]) -> None:
        """Record the gradients, by parameter index, that the user has dropped or written since they were exchanged. The
        next exchange shows whether all ranks have."""
        for index in dropped:
            self.used[index].fill_(False)
        self._edited |= dropped | written

    def run(self, own: ToExchange) -> None:
        """Collective. Fill in the norm and what is used. Raises the errors of the alarms, on every rank, before
        anything is updated: on CUDA one step later, in the same call, and the step in between is skipped."""
        self.check_alarms()
        about, self._edited = {**own.about, "edited": self._edited}, set()
        vector = self._vector
        vector.cleared.zero_()
        if own.norm_type is not None or own.stats:
            self.totals.copy_(self._local_totals(own.buckets, own.norm_type or 2.0))
        else:
            self.totals.zero_()
        options = None if self._hyper is None else self._hyper.hash_bits
        vector.alarms.fill({name: len(of) for name, of in about.items()} | {**own.numbers}, options, own.terms)
        vector.put_use(own.used)
        for index in set().union(*about.values()) if self._alarms else ():
            vector.named_counts[index].fill_(1.0)
        if own.tokens is not None:
            self.tokens.copy_(own.tokens)
        self.nonfinite.report(vector.reports, *own.flags)
        self.sharding.world.exchange(vector.all)
        if self._alarms and not is_capturing(self.sharding.device):
            vector.alarms.on_host.send()
            self._own_reasons = own.reasons
            # The host does not wait for a GPU, but for one case: a rank that has an alarm itself must know whether to
            # go on. The others raise when they read, in the next step; until then they skip by ``found_inf``.
            if vector.alarms.on_host.immediate or self._at_once:
                self.check_alarms()
            elif any(about.values()):
                self._raised = vector.alarms.read_first_raised()
        torch.gt(vector.use(), 0, out=self.used)
        self.state, self.norm_type = Exchanged.COUNTED if own.stats else Exchanged.USED, own.norm_type

    def combine_stages(
        self, norm_type: float | None, *, fresh: bool, stats: bool, inverse_scale: Tensor | None, counting: bool
    ) -> None:
        """Collective over the stages of a pipeline: see ``Pipeline.combine``. Make this stage's totals those of all.

        Args:
            fresh: whether this stage has exchanged since the last call.
            counting: whether it has counted tokens.
        """
        assert self._pipeline is not None
        if fresh:
            self._own_totals.copy_(self.totals)
        own = self._own_totals if norm_type is not None or stats else None
        raised, tokens = self._vector.alarms.raised_on_device(), self.tokens if counting else None
        of_all = self._pipeline.combine(own, raised, inverse_scale, tokens)
        # Another stage may have exchanged again, where gradients were edited: then its count of non-finite values is
        # another, while the norm of the clip stays.
        first = 0 if fresh else 1
        if own is not None:
            self.totals[first:].copy_(of_all[first:])

    @property
    def failed(self) -> bool:
        """True on a rank that has an alarm itself, and knows already that it is raised: the step is skipped."""
        return self._raised is not None

    def check_alarms(self, *, together: bool = True) -> None:
        """Raise the last step's alarm, if any. A GPU's report has arrived; else the host is a step ahead and waits.

        ``together``: collective where ranks differ in options or parameters, which are gathered for the message.
        """
        if not self._alarms or is_capturing(self.sharding.device):  # a replayed graph has no host to raise
            return
        alarm, self._raised = self._raised or self._vector.alarms.read_first_raised(), None
        if alarm is not None:
            named = [index for index, count in enumerate(self._vector.named_counts.tolist()) if count > 0]
            names = ", ".join(self.labels[index] for index in named) or "a parameter"
            dtypes = {str(self._parameters[index].dtype) for index in named if index in self._parameters}
            self.outdate()
            if alarm.name == OPTIONS and self._hyper is not None:
                self._hyper.reset_hash()  # on all ranks: the next step compares what it uses itself
                try:
                    if together:
                        check_same(self.sharding.world, self._hyper.describe_used(), "step", "step with")
                except RankMismatchError as error:
                    raise alarm.error("", "", [f"{error}; {alarm.message}"]) from None
            if alarm is UNEQUAL and self._name_unequal is not None and together:
                self._name_unequal()
            raise alarm.error(names, " or ".join(sorted(dtypes)), self._own_reasons.get(alarm.name, ()))

    def decide(self, skip_nonfinite: bool) -> None:
        """Fill in ``found_inf``. A raised alarm always skips the step; a non-finite gradient does if asked."""
        nonfinite = self.totals[1:] if skip_nonfinite else 0.0
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
        return stats.sum(0)


class ExchangeVector:
    """The vector, with a view for each part.

    An expert has a used count for each of the parameters that ranks have under its name: one may be used, and another
    not.

    Args:
        of: the alarms that it carries; without any it does not name parameters either.
        places: of each parameter, the number of its used counts, and the number of this rank's among them.
        world: the ranks that exchange it.

    Attributes:
        all: fp32, the vector. The others are views of it.
        totals: [2] the norm term and the non-finite count.
        alarms: their columns.
        used_counts: [parameters, and more of experts] how many ranks use each.
        named_counts: [parameters] how many ranks have an alarm about each.
        tokens: [1]
        reports: [2 * ranks] of non-finite gradients, see ``NonFinite``.
        cleared: the last three: what other ranks write is zeroed before an exchange.
    """

    def __init__(
        self, of: Sequence[Alarm], places: Sequence[tuple[int, int]], world: Comm, device: torch.device
    ) -> None:
        counts = [count for count, _ in places]
        cleared = [len(places) if of else 0, 1, 2 * world.world_size]
        sizes = [2, sum(alarm.columns for alarm in of), sum(counts), *cleared]
        self.all = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
        self.cleared = self.all[-sum(cleared) :]
        self.totals, columns, self.used_counts, self.named_counts, self.tokens, self.reports = self.all.split(sizes)
        self.alarms = AlarmColumns(of, columns)
        self._own_use = torch.zeros(len(places), dtype=torch.float32, device=device)  # as last sent there
        self._sent = bytearray(len(places))
        self._own_counts: Tensor | None = None  # [parameters] int64, the places of this rank's counts; None: all
        if sum(counts) > len(places):
            self._own_counts = to_device(device, own_places(places), torch.int64)

    def put_use(self, used: bytearray) -> None:
        """Write what this rank uses, a byte a parameter. As a rule it is as in the step before: nothing is sent."""
        here = self._own_use
        if is_capturing(self.all.device):
            # A copy from the host would read, at every replay, memory that is long gone: the values go into kernels.
            here = torch.ones_like(here)
            for index in (index for index, flag in enumerate(used) if not flag):
                here[index].zero_()
        elif used != self._sent:
            host = torch.frombuffer(used, dtype=torch.uint8).float()
            here.copy_(host.pin_memory() if here.is_cuda else host, non_blocking=True)
            self._sent = bytearray(used)
        if self._own_counts is None:
            self.used_counts.copy_(here)
        else:
            self.used_counts.zero_().index_copy_(0, self._own_counts, here)

    def use(self) -> Tensor:
        """[parameters] fp32, the number of ranks that use each of this rank's parameters."""
        return self.used_counts if self._own_counts is None else self.used_counts.index_select(0, self._own_counts)


def to_device(device: torch.device, values: Sequence[object], dtype: torch.dtype) -> Tensor:
    """Make a tensor of ``values`` on ``device``. The host does not wait for the copy."""
    host = torch.tensor(values, dtype=dtype, device="cpu")
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def own_places(places: Sequence[tuple[int, int]]) -> list[int]:
    """Find this rank's entry of each parameter in a vector of all. ``places``: see ``Exchange``."""
    starts = itertools.accumulate((count for count, _ in places), initial=0)
    return [start + number for start, (_, number) in zip(starts, places, strict=False)]


class NonFinite:
    """The first gradient that was not finite in the latest run of skipped steps, by parameter, rank and step.

    Flags come from two places. ``pack`` marks gradients that were not finite on the rank that made them: the exchange
    of the same step carries them to all ranks. ``adam_step`` marks, on a skipped step, values of a shard that are not
    finite: an overflow born in the sum, which the shard's owner knows at once and the other ranks from the next
    exchange on. The record stays on the device until it is asked for.

    Attributes:
        marks: [parameters] int32, set by ``adam_step``.

    A report is two entries a rank, each a parameter's index plus one, or 0; only its own rank writes it.
    """

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self._rank, self._world_size = rank, world_size
        self.marks = torch.zeros(0, dtype=torch.int32, device=device)
        self._numbers = torch.zeros(0, dtype=torch.int64, device=device)  # [parameters] index
        self._steps, self._first_step = torch.zeros(2, dtype=torch.float32, device=device)
        self._was_bad, self._was_first = torch.zeros(2, dtype=torch.bool, device=device)
        self._record = torch.zeros(2 * world_size, dtype=torch.float32, device=device)

    def resize(self, parameters: int) -> None:
        keep_tensors_of(self)
        marks = torch.zeros(parameters, dtype=torch.int32, device=self.marks.device)
        marks[: len(self.marks)] = self.marks
        self.marks = marks
        self._numbers = torch.arange(parameters, device=self.marks.device)

    def report(self, entries: Tensor, flags: Tensor, slot_params: Tensor) -> None:
        """Fill in this rank's ``entries``. ``flags`` [slots]: set by ``pack``."""
        entries[self._rank] = _first(flags, slot_params)
        entries[self._world_size + self._rank] = _first(self.marks, self._numbers)

    def note(self, entries: Tensor, found_inf: Tensor) -> None:
        """Record every rank's reports, once a step, before the update. ``found_inf``: whether the step is skipped."""
        packed, marked = entries.split(self._world_size)
        self._steps += 1
        bad = (found_inf.reshape(()) > 0) | (packed.amax() > 0)
        first = bad & ~self._was_bad
        record_packed, record_marked = self._record.split(self._world_size)
        record_packed.copy_(torch.where(first, packed, record_packed))
        record_marked.copy_(torch.where(self._was_first, marked, record_marked * ~first))
        self._first_step.copy_(torch.where(first, self._steps, self._first_step))
        self._was_bad.copy_(bad)
        self._was_first.copy_(first)
        self.marks.zero_()

    def first(self) -> tuple[int | None, int | None, int] | None:
        """(parameter index, rank, step counted from 1), read on the host; None: every gradient was finite. Index and
        rank are None for an overflow born in the sum on another rank, in the step just made."""
        step = int(self._first_step)
        if step == 0:
            return None
        record = self._record.tolist()
        for place, entry in enumerate(record):
            if entry > 0:
                return int(entry) - 1, place % self._world_size, step
        own = int(_first(self.marks, self._numbers))
        return (own - 1, self._rank, step) if own and bool(self._was_first) else (None, None, step)


def _first(flags: Tensor, numbers: Tensor) -> Tensor:
    """[] int64: the number of the first flag that is set, plus one; 0 where none is."""
    if flags.numel() == 0:
        return flags.new_zeros((), dtype=torch.int64)
    place = flags.argmax()
    return (numbers.index_select(0, place.reshape(1)).reshape(()) + 1) * flags.amax()
