"""Reduces gradients while backward runs: hooks, readiness, and one fixed order of collectives.

A *round* is one synchronised backward: every bucket is reduced once in it, by ascending index, whatever order
gradients become ready in and whichever parameters a rank used. So the ranks agree on the schedule without
talking about it.

The first backward only observes: it launches nothing until it is over. Then the ranks agree on the order in
which gradients became ready (rank 0's) and on how often each did (the maximum over ranks), and the buckets
are laid out again in that order. So does the first one after parameters were added.

At stage 3 a bucket is a unit's, and leaves when the unit's backward is over; nothing needs to be observed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from .backward_watch import BackwardWatch
from .bucket import Bucket, GradState, Sharding
from .comm_buffers import CommBuffers
from .errors import CollectiveError, ParameterError, ZeroOptimError
from .replicas import check_not_replicated
from .unit_schedule import UnitSchedule


class Reducer:
    """Owns the buckets and their gradients, from the first hook of backward to ``finish`` in ``step``.

    Args:
        parameters: all trained parameters, by index; ``grow`` is told of new ones.
        labels: a name for each, for messages.
        make_buckets: builds the buckets for an order; parameters become views of them.
        overlap: reduce during backward. Else stage 1 reduces in ``finish``, the others at the end of backward.
        schedule: at stage 3, who knows which unit's backward is over.

    Attributes:
        nonfinite: [slots] int32, in the order of ``slot_params``: whether this rank's last gradient was not finite.
        slot_params: [slots] int64, the index of the parameter of each slot, bucket by bucket.
        on_layout: are told the new buckets after they were laid out again.
        on_backward: is told when a backward begins.
        late: parameters whose gradient arrived after their bucket had left; it stays on this rank.
        leftover: parameters with a gradient that ``finish`` found to be assigned after the last round: where all ranks
            have some, ``reduce_leftover`` lets ``finish`` reduce them.
    """

    def __init__(
        self,
        parameters: dict[int, Tensor],
        labels: Sequence[str],
        sharding: Sharding,
        make_buckets: Callable[[Sequence[int]], list[Bucket]],
        overlap: bool,
        schedule: UnitSchedule | None = None,
    ) -> None:
        self.parameters, self.labels, self.sharding, self.overlap = parameters, labels, sharding, overlap
        self._make_buckets, self._schedule = make_buckets, schedule
        self.synchronize = True  # False inside no_sync()
        self.observing = False
        self.late: set[int] = set()
        self.leftover: list[int] = []
        self.on_layout: Sequence[Callable[[list[Bucket]], None]] = ()
        self.on_backward: Callable[[], None] = lambda: None
        self._counts = dict.fromkeys(parameters, 1)  # how often each gradient becomes ready in a round
        self._forget_observation()
        self._ordered = False
        self._watch = BackwardWatch(self._begin_backward, self._end_backward)
        self._completing = False  # every unit that is over leaves now
        self._in_round = False  # a backward has begun that must end with every bucket reduced
        self._again = False  # so has another, before that round was complete: there must be one more
        self._cut_short = False  # a backward that was to be observed has raised
        self._rounds = 0  # complete rounds since the last step
        self._unreduced = False  # gradients may be on this rank that no round has reduced
        self._seen: dict[int, int] = {}
        self._held_back: set[int] = set()  # buckets with a gradient that a later hook of the user's may change
        self._post_hooks: dict[int, tuple[dict[int, object], int]] = {}  # of each parameter: all, and the id of ours
        self.order: list[int] = []
        self.buckets: list[Bucket] = []
        self._nodes: list[torch.autograd.graph.Node] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self.grow(list(parameters))
        if schedule is not None:
            schedule.followers.append(self)

    def grow(self, indices: Sequence[int]) -> list[Bucket]:
        """Take in parameters, in buckets after all others. The next backward observes. Returns the new buckets."""
        self.complete_open_round()
        order = list(reversed(indices))
        new = self._make_buckets(order)
        self._use([*self.order, *order], [*self.buckets, *new])
        self._hooks += [hook for index in indices for hook in self._register_hooks(index)]
        self._ordered = False
        self._unreduced = True
        self.observe()
        return new

    def lay_out(self, order: Sequence[int]) -> None:
        """Build all buckets anew for ``order``. No reduced gradient may be in a bucket."""
        for bucket in self.buckets:
            bucket.wait()
            bucket.wait_for_parameters()
            bucket.let_go()
        self._use(order, self._make_buckets(order))
        for follow in self.on_layout:
            follow(self.buckets)

    def _use(self, order: Sequence[int], buckets: Sequence[Bucket]) -> None:
        for bucket in self.buckets:
            bucket.wait()
        self.order, self.buckets = list(order), list(buckets)
        device = self.sharding.device
        largest = max((bucket.layout.numel * bucket.reduce_dtype.itemsize for bucket in buckets), default=0)
        self.buffers = CommBuffers(largest if self.sharding.reduces else 0, device)
        self._free_buffers()
        slots = [slot for bucket in buckets for slot in bucket.layout.slots]
        self.slot_params = torch.tensor([slot.param for slot in slots], dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros(len(slots), dtype=torch.int32, device=device)
        for bucket, flags in zip(buckets, self.nonfinite.split([len(b.params) for b in buckets]), strict=True):
            bucket.nonfinite = flags
        self.place = {
            slot.param: (number, index)
            for number, bucket in enumerate(self.buckets)
            for index, slot in enumerate(bucket.layout.slots)
        }
        self._used_of, self._used_now = (0, b""), bytearray()
        self._set_counts({})

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._schedule is not None:
            self._schedule.followers.remove(self)
        self._nodes.clear()
        try:
            for bucket in self.buckets:
                bucket.wait_for_parameters()
                bucket.wait()
        except CollectiveError:  # whoever closes after an error has seen it
            self.sharding.comm.out_of_step = True
            for bucket in self.buckets:
                bucket.abandon()
        for bucket in self.buckets:
            bucket.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it gradients add up on each rank and nothing is communicated."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
            self._unreduced = True  # whether or not this rank had a gradient: all must count rounds alike

    # -- backward ------------------------------------------------------------------------------------------------

    def _register_hooks(self, index: int) -> list[torch.utils.hooks.RemovableHandle]:
        parameter = self.parameters[index]
        trains = parameter.requires_grad
        parameter.requires_grad_(True)  # one that has a gradient, and is frozen by now, would take no hooks
        # A tensor's own hooks run under torch.autograd.grad too, which accumulates nothing.
        accumulate = torch.autograd.graph.get_gradient_edge(parameter).node
        self._nodes.append(accumulate)  # the parameter alone does not keep it
        hooks = [parameter.register_post_accumulate_grad_hook(partial(self._on_ready, index))]
        self._post_hooks[index] = (parameter._post_accumulate_grad_hooks, hooks[0].id)
        if self.sharding.reduces:
            hooks.append(accumulate.register_prehook(partial(self._before_accumulate, index)))
        parameter.requires_grad_(trains)
        return hooks

    def _before_accumulate(self, index: int, grads: tuple[Tensor, ...]) -> None:
        number, slot = self.place[index]
        self.buckets[number].before_accumulate(slot)

    def _on_ready(self, index: int, parameter: Tensor) -> None:
        self._watch.enter()
        number, slot = self.place[index]
        bucket = self.buckets[number]
        self._seen[index] = seen = self._seen.get(index, 0) + 1
        if self.synchronize and number < self._next and not self._again:
            self.late.add(index)
            return
        self._check_in_place(parameter, bucket, slot)
        if self._is_changed_later(index):
            self._held_back.add(number)
        if self.observing:
            self._observed_order.append(index)
        elif self._schedule is not None and self.sharding.reduces:  # it leaves when its unit is over
            if self._free_buffers() and self._on_gloo:
                self._schedule.send_ahead()
        elif self._again:
            pass  # to be reduced by ``finish``
        elif seen <= self._counts[index]:
            self._missing[number] -= 1
            if self._missing[number] == 0:
                self._on_full(number)

    def _is_changed_later(self, index: int) -> bool:
        """Whether a hook of the user's, which may change the gradient, runs after ours."""
        hooks, own = self._post_hooks[index]
        return len(hooks) > 1 and next(reversed(hooks)) != own

    def _on_full(self, number: int) -> None:
        if not self.synchronize or not self.sharding.reduces:
            if self.buckets[number].can_collect and not torch.is_grad_enabled():  # else ``.grad`` has a graph to keep
                self.buckets[number].collect()
        elif self.overlap:
            while self._next < len(self.buckets) and self._missing[self._next] == 0 and not self._waits_for_end():
                if self._must_not_wait and not self.buffers.free:
                    return
                self._launch_next()

    def backward_begins(self) -> None:
        """A backward that raised has left its round open: it ends before another goes through the units."""
        if not self._watch.running and not (self._in_round and self._must_not_wait):
            self.complete_open_round()

    def launch_over(self) -> None:
        """Another unit is over: launch what no gradient can come for any more in this backward."""
        if self._schedule is None or not (self._completing or (self._in_round and self.synchronize and self.overlap)):
            return
        while self._next < len(self.buckets) and self._schedule.is_over(self.buckets[self._next].flat):
            if self._must_not_wait and not self._completing and not self.buffers.free:
                return
            self._launch_next()

    def _free_buffers(self) -> bool:
        """At stage 3, do without buffers for as long as no reduction is under way. Returns whether some were freed."""
        freed = self.buffers.allocated and self._by_unit and self.buffers.free
        if freed:
            self.buffers.deallocate()
        return freed

    @property
    def busy(self) -> bool:
        """Whether a reduction is under way that the host is going to wait for: under gloo. What else is communicated
        meanwhile would be a burden on the same threads, and need memory beside the buffers, which are freed if it is
        found to have arrived. On CUDA the host is ahead of both, and never sees one end."""
        self._free_buffers()
        return self.buffers.allocated and self._by_unit and self._on_gloo

    @property
    def _on_gloo(self) -> bool:
        return self.sharding.comm.is_gloo(self.sharding.device)

    def follow_order(self) -> None:
        """Reduce in the order in which backward is through with units, as the ranks have agreed."""
        assert self._schedule is not None
        flats = [flat for unit in self._schedule.over_order for flat in unit.flats]
        buckets = sorted(self.buckets, key=lambda bucket: flats.index(bucket.flat))
        if buckets != self.buckets:
            self._use([slot.param for bucket in buckets for slot in bucket.layout.slots], buckets)

    @property
    def _by_unit(self) -> bool:
        return self._schedule is not None and self.sharding.reduces

    def _waits_for_end(self) -> bool:
        """Whether the next bucket's gradients may still change in this backward."""
        return self._repeats[self._next] or self._next in self._held_back

    def _check_in_place(self, parameter: Tensor, bucket: Bucket, slot: int) -> None:
        if bucket.flat.sharded and not bucket.flat.shown:
            raise ZeroOptimError(
                f"the gradient of {bucket.label(slot)} was computed while its unit was sharded, and is worthless: a "
                "gradient came into the unit by another way than what its forward returned, changed or left in "
                "attributes. Return that tensor from the unit's forward"
            )
        moved = parameter.data_ptr() != bucket.flat.addresses[slot] or parameter.dtype != bucket.dtype
        if moved or not parameter.is_contiguous():
            raise ParameterError(
                f"{bucket.label(slot)} was moved, cast or given new data after the optimizer was made "
                f"(it is {parameter.dtype} on {parameter.device}): call .to() / .half() before, or make a new optimizer"
            )

    def _begin_backward(self) -> None:
        self.on_backward()
        if self._in_round and self._must_not_wait:
            self._again = True
            return
        self.complete_open_round()
        self._in_round = self._reduces_in_backward()

    def complete_open_round(self) -> None:
        """A backward that raised has left its round open, or one that must not wait: complete it, as other ranks do."""
        self._watch.forget()
        self._cut_short |= bool(self._seen)
        if self._in_round:
            self._complete_round()
        elif self._seen:
            self._start_round()

    def complete_orderly_round(self) -> None:
        """Complete a round whose backward has ended: how far each rank has got with it is a matter of time."""
        if self._in_round and not self._seen and not self._watch.running:
            with suppress(CollectiveError):  # whoever closes after an error has seen it
                self._complete_round()

    def _end_backward(self) -> None:
        self._note_counts()
        if self._in_round and self._must_not_wait:
            self._seen = {}  # it was not cut short
            while not self.observing and self._next < len(self.buckets) and self.buffers.free:
                self._launch_next()  # the next backward, or step, completes the round
        elif self._in_round:
            self._complete_round()
        else:
            self._unreduced = True
            self._start_round()

    def _reduces_in_backward(self) -> bool:
        """Whether a backward begun now leaves its gradients reduced when it ends."""
        return self.sharding.reduces and self.synchronize and (self.overlap or self.sharding.stage != 1)

    @property
    def _must_not_wait(self) -> bool:
        """Another optimizer reduces in the same backward. A rank that uses the parameters of that one alone would wait
        for us there, and we for it here: only what every rank calls in the same order, such as ``step``, may wait."""
        return self.sharding.comm.shared and self.sharding.stage >= 1

    # -- rounds --------------------------------------------------------------------------------------------------

    def _set_counts(self, counts: dict[int, int]) -> None:
        """How often each gradient becomes ready in a round; once where ``counts`` has none."""
        self._counts = dict.fromkeys(self.parameters, 1) | counts
        of_buckets = [[self._counts[slot.param] for slot in bucket.layout.slots] for bucket in self.buckets]
        self._expected = [sum(of_bucket) for of_bucket in of_buckets]
        self._repeats = [any(count > 1 for count in of_bucket) for of_bucket in of_buckets]
        self._start_round()

    def _start_round(self) -> None:
        self._in_round = self._again = False
        self._next = 0
        self._seen = {}
        self._held_back.clear()
        self._missing = list(self._expected)

    @torch.no_grad()
    def _launch_next(self) -> None:
        if self.busy:
            self.buffers.deallocate()  # one at a time: then they need memory for one
        self.buckets[self._next].launch(self.buffers)
        self._next += 1

    def _complete_round(self) -> None:
        if self.observing:
            self._end_observation()
        if self._schedule is not None:
            self._completing = True
            self._schedule.complete_backward()
            self._completing = False
        while self._next < len(self.buckets):
            self._launch_next()
        if self.sharding.stage == 0:  # `.grad` is the averaged gradient, to be read at once
            for bucket in self.buckets:
                bucket.wait()
        self._rounds += 1
        self._unreduced = False
        self._start_round()

    def make_readable(self) -> bool:
        """Bring all gradients into ``grad_buffer``, if this is where ``.grad`` shows them. Returns whether it is."""
        if self.sharding.stage == 0 and self.sharding.reduces:
            self.finish()
            return True
        alone = not self.sharding.reduces
        waiting = self.sharding.stage == 1 and not self.overlap and all(bucket.can_collect for bucket in self.buckets)
        if alone or waiting:
            self._collect()
        return alone or waiting

    @torch.no_grad()
    def _collect(self) -> bool:
        if self.observing:
            self._end_observation()
        return any([bucket.collect() for bucket in self.buckets])  # noqa: C419  every bucket, whatever the first says

    def _end_observation(self) -> None:
        """Agree with the other ranks on readiness, and lay the buckets out in the order that rank 0 saw."""
        check_not_replicated(self.parameters, self.labels)
        self._note_counts()
        report = (self._observed_order, self._observed_counts, self._cut_short)
        reports = self.sharding.comm.gather_objects(report, "the first backward")
        if not any(order for order, _, _ in reports):
            return  # a step before any backward: there is still nothing to learn from
        counts = dict(self._counts)
        for _, of_rank, _ in reports:
            for index, count in of_rank.items():
                counts[index] = max(count, counts[index])
        whole = not any(cut_short for _, _, cut_short in reports)
        if whole and not self._ordered and all(bucket.state is not GradState.REDUCED for bucket in self.buckets):
            last_first = dict.fromkeys(reversed(reports[0][0]))  # a gradient counts as ready when it last became so
            order = list(reversed(last_first))
            order += [index for index in self.order if index not in last_first]
            if order != self.order:
                self.lay_out(order)
            self._ordered = True
        self.observing = not (whole and self._ordered)
        self._forget_observation()
        self._set_counts(counts)

    def _note_counts(self) -> None:
        if self.observing:
            for index, count in self._seen.items():
                self._observed_counts[index] = max(count, self._observed_counts.get(index, 0))

    def observe(self) -> None:
        """Let the next synchronised backward count anew how often each gradient becomes ready. The layout stays."""
        self.complete_open_round()
        self.late.clear()
        self._forget_observation()
        self._set_counts({})
        self.observing = self.sharding.reduces and not self._by_unit
        if self._schedule is not None:
            self._schedule.record()

    def _forget_observation(self) -> None:
        self._observed_counts: dict[int, int] = {}
        self._observed_order: list[int] = []
        self._cut_short = False

    # -- step ----------------------------------------------------------------------------------------------------

    def finish(self) -> bytearray:
        """Complete what is open; afterwards every bucket's ``grad_shard`` holds what is to be applied.

        Returns one byte a parameter index: 1 where this rank has a gradient for it.
        """
        self._watch.forget()
        if not self.sharding.reduces:
            self._collect()
        else:
            if self._in_round and self._again:
                self._complete_round()
                self._unreduced = True
            if self._rounds == 0 or self._unreduced or self._in_round:
                self._complete_round()
            unreduced = [index for bucket in self.buckets for index in bucket.settle().unreduced]
            self.leftover = [] if self.late else unreduced
        for bucket in self.buckets:
            bucket.wait()
        self._free_buffers()
        return self._used()

    def reduce_leftover(self) -> None:
        self._unreduced = True

    @property
    def refused(self) -> dict[int, str]:
        """By parameter index, why this rank's gradient could not be used."""
        slots = [(bucket, index) for bucket in self.buckets for index in bucket.refused]
        return {bucket.layout.slots[index].param: bucket.refused[index] for bucket, index in slots}

    def recheck(self) -> tuple[bool, bool]:
        """After ``finish``: whether gradients were assigned since, and whether some were dropped."""
        if not self.sharding.reduces:
            return self._collect(), False
        settled = [bucket.settle() for bucket in self.buckets]
        return any(of.unreduced for of in settled), any(of.dropped for of in settled)

    def end_step(self) -> None:
        """The gradients were applied. They stay until they are cleared, and the next step has rounds of its own."""
        self._rounds = 0
        if self._schedule is not None:
            self._schedule.end_step()

    def restore_order(self, order: Sequence[int]) -> None:
        """Lay the buckets out in a saved order; parameters not in it follow. Gradients are dropped."""
        known = set(order)
        order = [*order, *(index for index in self.order if index not in known)]
        if self.sharding.shards > 1 and not self._by_unit and order != self.order:
            self.clear()
            self.lay_out(order)

    def _used(self) -> bytearray:
        slots = b"".join(bucket.used for bucket in self.buckets)
        if (len(self.labels), slots) != self._used_of:  # as a rule the same set, step after step
            self._used_of = len(self.labels), slots
            self._used_now = bytearray(len(self.labels))
            for index, flag in zip(self.place, slots, strict=True):
                self._used_now[index] = flag
        return self._used_now

    def clear(self, set_to_none: bool = True) -> None:
        """Drop every gradient, or make it zero. A round that an exception cut short is completed for the others."""
        self.complete_open_round()
        if self._schedule is not None:
            self._schedule.begin_step()
        self._rounds, self._unreduced = 0, False
        self.late.clear()
        self.leftover.clear()
        if self.observing:
            self._forget_observation()
        self.nonfinite.zero_()
        for bucket in self.buckets:
            bucket.clear() if set_to_none else bucket.zero()
        self._free_buffers()
