"""Updates on the host before the norm is known, while backward still runs.

A clip factor below 1 and an overflow are rare. So each shard is updated as its gradient arrives, as if neither came:
into spare buffers, by a thread of its own. ``step`` compares the assumed coefficients with the true ones. Where all are
the same, bit for bit, live and spare change places. Else the update is made again, from the live state, which nothing
has touched::

    backward   | bucket 2 | bucket 1 | bucket 0 |
    thread                | update 2 | update 1 | update 0 |
    step                                        norm | as assumed? | send 2, 1, 0

The assumptions: gradients have the same factor as last time, unclipped; every parameter that was updated last time is
updated; and as many reductions come before ``step`` as last time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..params.parameter_set import ParameterSet
from ..rules.group_rules import GroupRules
from ..rules.update_rule import ShardUpdate, UpdateRule, Whole
from ..stores.host_store import HostStore
from .hyper_table import HyperTable
from .workplace import Coefficients, OnHost

_HOST = torch.device("cpu")


@dataclass
class Guesses:
    """Counts of updates of shards: those assumed right, those made again, and those given up before the step, as a
    gradient changed, or the state was read or written."""

    right: int = 0
    redone: int = 0
    dropped: int = 0


@dataclass(frozen=True)
class Guess:
    """An update under way, or over, in a thread. ``by``: the coefficients that it assumes."""

    by: Coefficients
    over: Future[None]

    def holds(self, by: Coefficients, rule: UpdateRule, parameters: Tensor) -> bool:
        """True if the assumed coefficients are those of ``by``, for these ``parameters`` [n] int64 of ``rule``."""
        if not by.updates:
            return False
        same = _same_rows(by.hyper[rule], self.by.hyper[rule], parameters)
        same = same and _same_rows(by.rates, self.by.rates, parameters)
        return same and _factor(by.grad_scale) == _factor(self.by.grad_scale)


class Speculation:
    """Updates one shard ahead. It has masters: its parameters are only written.

    NONE ── gradient_taken ──> a ``Guess`` ── confirm: it holds, or not; drop ──> NONE

    Args:
        page: the shard's, in the ``store``.
        row_slot: [shard_numel / ROW] int32, the parameter index of each row.
        wholes: see ``ShardUpdate``.
        row_stats: what the update measures of each row; None: nothing. It is the shard's where the guess was right.
        row_keys: see ``ShardUpdate``.
    """

    def __init__(
        self,
        speculator: Speculator,
        rule: UpdateRule,
        place: OnHost,
        store: HostStore,
        page: int,
        row_slot: Tensor,
        row_stats: Tensor | None = None,
        wholes: Sequence[Whole] = (),
        row_keys: Tensor | None = None,
    ) -> None:
        self._wholes, self._row_keys = wholes, row_keys
        self._speculator, self._rule, self._place, self._store = speculator, rule, place, store
        self._prepared = rule.prepared()
        self._page, self._row_slot, self.row_stats = page, row_slot, row_stats
        self._parameters = torch.unique(row_slot[row_slot >= 0]).long()  # [n] those in this shard
        self._guess: Guess | None = None
        store.allocate_spare(page)
        place.expect_guesses(self)

    def gradient_taken(self) -> None:
        by = self._speculator.assumed(self._parameters)
        if by is not None:
            self._guess = self._speculator.begin(by, partial(self._update_spare, by))

    def gradient_changes(self) -> None:
        self.drop()

    @property
    def busy(self) -> bool:
        return self._guess is not None and not self._guess.over.done()

    def _update_spare(self, by: Coefficients) -> None:
        """Update the spare state. The thread runs this."""
        gradient = self._place.gradient()
        live, spare = self._store.fetch(self._page), self._store.spare(self._page)
        for name, tensor in spare.items():
            tensor.copy_(live[name])
        parameters = self._place.parameters_to_guess()
        shared = (by.hyper[self._rule], by.grad_scale, by.found_inf, by.marks, by.rates)
        measured, wholes, keys = self.row_stats, self._wholes, self._row_keys
        update = ShardUpdate(
            gradient, parameters, spare, self._row_slot, *shared, row_stats=measured, wholes=wholes, row_keys=keys
        )
        self._prepared.update([update])

    def confirm(self, by: Coefficients) -> bool:
        """Return whether the update was guessed right, and is on its way. The step calls this."""
        guess, self._guess = self._guess, None
        if guess is None:
            return False
        guess.over.result()
        right = guess.holds(by, self._rule, self._parameters)
        self._speculator.count(right=right)
        if right:
            self._store.swap(self._page)
            self._place.guessed()
        return right

    def drop(self) -> None:
        """Drop the guess: the live state, or the gradient, is about to change, or to go."""
        guess, self._guess = self._guess, None
        if guess is not None:
            self._speculator.guesses.dropped += 1
            if not guess.over.cancel():
                guess.over.result()


class Speculator:
    """Knows what to assume of the next step, and has the thread.

    Args:
        rules: of the groups.
        parameters: whose groups are read anew for every step.
        threads: that an update takes.
    """

    def __init__(self, rules: GroupRules, parameters: ParameterSet, threads: int) -> None:
        self._rules, self._parameters, self._threads = rules, parameters, threads
        self.guesses = Guesses()
        self._pool: ThreadPoolExecutor | None = None
        self._hyper, self._room = HyperTable([], rules.by_group, _HOST), (0, 0)  # for so many parameters and groups
        self._last: Coefficients | None = None  # of the last step; None: there is nothing to go by
        self._next: Coefficients | None = None  # what is assumed; made when it is first asked for

    def step_is(self, by: Coefficients) -> None:
        """Note the true coefficients of this step, on the host. The next is assumed to be alike."""
        self._last, self._next = by, None

    def assumed(self, parameters: Tensor) -> Coefficients | None:
        """Assume the coefficients of the next step.

        None where there is nothing to go by, or these ``parameters`` [n] int64 are not all updated.
        """
        last = self._last
        if last is None or len(last.used) != len(self._parameters.group_of) or not bool(last.used[parameters].all()):
            return None
        if self._next is None and not self._on_a_device():
            self._next = self._after(last)
        return self._next

    def _on_a_device(self) -> bool:
        """True if a group has a number in a device tensor, which the host would have to wait for."""
        groups = zip(self._rules.by_group, self._parameters.groups, strict=True)
        values = (value for rule, group in groups for value in rule.read_group(group))
        return any(isinstance(value, Tensor) and value.device != _HOST for value in values)

    def _after(self, last: Coefficients) -> Coefficients:
        group_of, groups = self._parameters.group_of, self._parameters.groups
        if self._room != (len(group_of), len(groups)):
            self._room = len(group_of), len(groups)
            self._hyper = HyperTable(group_of, self._rules.by_group, _HOST)
        hyper = self._hyper
        hyper.steps.copy_(last.steps)
        hyper.begins.zero_()  # all of these were updated before
        hyper.advance(groups, last.used)
        found_inf, marks = torch.zeros_like(last.found_inf), torch.zeros_like(last.marks)
        scale = last.inverse_scale
        return Coefficients(hyper.tables, scale, scale, found_inf, marks, last.used, hyper.steps, rates=hyper.rates)

    def begin(self, by: Coefficients, update: Callable[[], None]) -> Guess:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "zero-optim-update", torch.set_num_threads, (self._threads,))
            self._pool.submit(torch.get_num_threads).result()
            torch.set_num_threads(torch.get_num_threads())  # what that thread has set is not for threads born later
        return Guess(by, self._pool.submit(update))

    def count(self, *, right: bool) -> None:
        self.guesses.right += right
        self.guesses.redone += not right

    def close(self, *, wait: bool) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=wait, cancel_futures=True)
            self._pool = None


def _same_rows(table: Tensor | None, other: Tensor | None, parameters: Tensor) -> bool:
    if table is None or other is None:
        return table is other
    return torch.equal(table[parameters].view(torch.int32), other[parameters].view(torch.int32))


def _factor(scale: Tensor | None) -> float:
    return 1.0 if scale is None else float(scale)
