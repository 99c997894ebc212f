"""Finds out that ranks wait for each other in vain, long before the group's time-out.

A program can make ranks launch different numbers of rounds: one of several synchronised backwards raised on one rank
before its first gradient, say, and nobody zeroed. Each rank then waits for a collective that no other takes part in,
and by default for half an hour::

    rank 0   backward: raises           backward   step: the norm     waits for rank 1
    rank 1   backward (one round)       backward   step: its round 2  waits for rank 0

Or ranks wait in different groups, each for what the other would do next::

    rank 0   backward of a sharded model: waits in its gathers for rank 1
    rank 1   the same backward: raises at once       step of another optimizer: waits for rank 0

Or they wait for the same collective, and take it for different ones::

    rank 0   an evaluation   forward: gathers the root     waits for rank 1
    rank 1                   backward: gathers unit 3      waits for rank 0

Or they were given different ranks, and each waits in a call for others who wait in the same call, with other ranks::

    rank 0   ShardedAdamW(mesh=mesh["dp"])       waits for rank 2
    rank 2   ShardedAdamW(mesh=world_mesh)       waits for ranks 0, 1 and 3

No message shows this. But a host that waits has time: after some seconds it writes its place into the job's store, and
reads the places of the other ranks. Where all have been waiting, with nothing changed, and not all at the same place,
they raise. They do not where one of them waits for a collective that all have issued: it is on its way, over a slow
connection::

    rank 0   waits for the gather of unit 3, which takes a minute
    rank 1   has it, and waits for the reduction of unit 4, which takes a minute

Under gloo alone: on CUDA the host does not wait.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

import torch.distributed as dist

from ..errors import RankMismatchError

SECONDS = 2.0
"""Between two looks. A step that waits for less costs nothing."""
LOOKS = 4
"""Looks at which all ranks must be found unchanged before one raises."""

ISSUED_LATELY = 1024
"""Collectives of which a rank remembers kind and size, of each owner."""

_ALL: dict[tuple[str, ...], Standstill] = {}


@dataclass(frozen=True)
class Wait:
    """The place at which a rank waits.

    Attributes:
        owner: the optimizer, or sharded model, that waits, by the name of its process group; see ``Comm.owner``.
        rounds: launched by this rank there. Ranks that only lag behind show equal numbers as soon as they catch up.
        what: the collective, for people.
        number: of this collective among those that the rank has issued there: all ranks issue them in one order.
        agreeing: whether it goes over the given group, as in loading.
        call: the call that every rank has to make, as "full_state_dict"; "": none.
    """

    owner: str
    rounds: int
    what: str
    number: int = 0
    agreeing: bool = False
    call: str = ""

    @property
    def whole(self) -> str:
        """The owner, without the name of a part."""
        return whole_of(self.owner)


Issuances = Mapping[str, Sequence[tuple[int, str]]]
"""What a rank has issued lately: by owner, the number of each collective, and its kind and size."""


@dataclass(frozen=True)
class Verdict:
    """A finding that ranks wait in vain: why, for people, and the owners of the waits (``Wait.owner``).

    ``met``: the owner for which some ranks wait over the given group, where others have not come; "": there is none.
    """

    text: str
    owners: Sequence[str] = ()
    met: str = ""


class Standstill:
    """The record of the waits of certain ranks, in any of their groups: it writes this rank's, and reads the others'.

    Groups of the same ranks alone share a record: a rank that waits in a group with yet other ranks may be waiting for
    one that computes. A wait within a node counts among all ranks of the model: where all of these wait, none of them
    computes.
    """

    def __init__(self, ranks: Sequence[int], of: str) -> None:
        self._ranks, self._of = list(ranks), of
        self._waits = 0
        self._seen: tuple[str, ...] = ()
        self._looks = 0
        self._written = False

    def look(self, wait: Wait, ranks: Sequence[int] = (), issued: Callable[[], Issuances] = dict) -> Verdict | None:
        """Write this rank's wait for ``ranks``, and read the others'. Call it after every ``SECONDS`` of waiting.

        ``issued``: lists what this rank has issued, for the optimizers and sharded models of exactly these ranks. It is
        called once in a wait.

        Returns a verdict, on each of the ranks, where they wait in vain. Raises RankMismatchError where they were given
        different ranks to wait for.
        """
        store = dist.distributed_c10d._get_default_store()
        if (verdict := self.verdict()) is not None:
            self.ended()
            return verdict
        if wait.agreeing and not self._of:
            _MEETINGS.look(ranks, wait.what)
        if not self._written:
            self._waits += 1
            store.set(self._issued_key(dist.get_rank()), json.dumps(issued()))
            store.set(self._key(dist.get_rank()), json.dumps([astuple(wait), self._waits]))
            self._written = True
        keys = [self._key(rank) for rank in self._ranks]
        # A rank without an entry has never waited: it computes.
        if not store.check(keys):
            return None
        # "": the rank does not wait now. A changed entry: it waits somewhere else by now, so it goes on.
        now = tuple(store.get(key).decode() for key in keys)
        self._looks = self._looks + 1 if now == self._seen and "" not in now else 0
        self._seen = now
        return self._judge(now) if self._looks == LOOKS else None  # once: what it judges by does not change

    def _judge(self, entries: Sequence[str]) -> Verdict | None:
        """Judge ranks that have all waited for long, with nothing changed: in vain, unless all wait at one place, or a
        collective is on its way."""
        store = dist.distributed_c10d._get_default_store()
        read = [json.loads(entry) for entry in entries]
        waits = [Wait(*wait) for wait, _ in read]
        # A collective that all wait for is slow, and the time-out of the group is for that.
        if len({(wait.owner, wait.rounds, wait.agreeing, wait.number, wait.what) for wait in waits}) == 1:
            return None
        issued = [json.loads(store.get(self._issued_key(rank)).decode()) for rank in self._ranks]
        if any(_is_on_its_way(wait, issued) for wait in waits):
            return None
        by_rank = dict(zip(self._ranks, waits, strict=True))
        one_owner = len({wait.whole for wait in waits}) == 1 and len({wait.rounds for wait in waits}) > 1
        if len({wait.call for wait in waits}) > 1:
            text = _different_calls(by_rank)
        else:
            text = _different_rounds(by_rank) if one_owner else _different_places(by_rank)
        agreeing = {wait.owner for wait in waits if wait.agreeing}
        met = agreeing.pop() if len(agreeing) == 1 else ""
        verdict = Verdict(text, [*{wait.owner: None for wait in waits}], met)
        for rank, (_, number) in zip(self._ranks, read, strict=True):  # this rank may be gone before another looks
            store.set(self._verdict_key(rank, number), json.dumps(astuple(verdict)))
        self.ended()
        return verdict

    def verdict(self) -> Verdict | None:
        """Read why another rank has given up during this rank's present wait; None: none has."""
        try:
            store = dist.distributed_c10d._get_default_store()
            key = self._verdict_key(dist.get_rank(), self._waits)
            if self._written and store.check([key]):
                return Verdict(*json.loads(store.get(key).decode()))
            of_meetings = None if self._of else _MEETINGS.verdict()
            return None if of_meetings is None else Verdict(of_meetings)
        except RuntimeError:  # the store has gone with its rank
            return None

    def ended(self) -> None:
        """Note that this rank does not wait any more."""
        if not self._of:
            _MEETINGS.ended()
        if self._written:
            self._written, self._seen, self._looks = False, (), 0
            with contextlib.suppress(RuntimeError):  # the store has gone with its rank
                dist.distributed_c10d._get_default_store().set(self._key(dist.get_rank()), "")

    def _key(self, rank: int) -> str:
        return f"zero_optim/waits of {self._ranks}{self._of}/{rank}"

    def _issued_key(self, rank: int) -> str:
        return f"zero_optim/issued by {self._ranks}{self._of}/{rank}"

    def _verdict_key(self, rank: int, number: int) -> str:
        return f"zero_optim/verdict of {self._ranks}{self._of}/{rank}/{number}"


class _Meetings:
    """Meetings: calls in which a rank waits until all ranks that it was given have come to the same call.

    A meeting has all of its ranks, or it does not begin. So follow the ranks that a rank waits for, those that these
    wait for, and so on: where each of them waits in a meeting that is not complete, they wait in vain. This does not
    hold for other collectives: a rank that waits elsewhere may have issued its part.
    """

    def __init__(self) -> None:
        self._number = 0  # of this rank's waits
        self._seen: Mapping[int, str] = {}
        self._looks = 0
        self._written = False

    def look(self, ranks: Sequence[int], what: str) -> None:
        """Look once more, in a wait for ``ranks``. Raises RankMismatchError on each of the ranks that wait in vain."""
        store = dist.distributed_c10d._get_default_store()
        if not self._written:
            self._number += 1
            store.set(self._key(dist.get_rank()), json.dumps([[*ranks], what, self._number]))
            self._written = True
        now = self._all_that_are_waited_for()
        self._looks = self._looks + 1 if now and now == self._seen else 0
        self._seen = now
        if self._looks < LOOKS:
            return
        met = {rank: json.loads(entry) for rank, entry in now.items()}
        # A meeting to which all have come goes on.
        if any(all(met[other][0] == wanted for other in wanted) for wanted, _, _ in met.values()):
            return
        verdict = _different_ranks(met)
        for rank, (_, _, number) in met.items():  # this rank may be gone before another looks
            store.set(self._verdict_key(rank, number), verdict)
        self.ended()
        raise RankMismatchError(verdict)

    def _all_that_are_waited_for(self) -> dict[int, str]:
        """Find the meetings, by rank, of all that this rank waits for; none where one of these waits in no meeting."""
        store = dist.distributed_c10d._get_default_store()
        found: dict[int, str] = {}
        more = {dist.get_rank()}
        while more:
            keys = [self._key(rank) for rank in sorted(more)]
            if not store.check(keys):
                return {}
            entries = [store.get(key).decode() for key in keys]
            if "" in entries:
                return {}
            found |= zip(sorted(more), entries, strict=True)
            more = {rank for entry in entries for rank in json.loads(entry)[0]} - found.keys()
        return found

    def verdict(self) -> str | None:
        """Read why another rank has given up during this rank's present wait; None: none has."""
        key = self._verdict_key(dist.get_rank(), self._number)
        store = dist.distributed_c10d._get_default_store()
        return store.get(key).decode() if self._written and store.check([key]) else None

    def ended(self) -> None:
        """Note that this rank does not wait any more."""
        if self._written:
            self._written, self._seen, self._looks = False, {}, 0
            with contextlib.suppress(RuntimeError):  # the store has gone with its rank
                dist.distributed_c10d._get_default_store().set(self._key(dist.get_rank()), "")

    @staticmethod
    def _key(rank: int) -> str:
        return f"zero_optim/meeting of {rank}"

    @staticmethod
    def _verdict_key(rank: int, number: int) -> str:
        return f"zero_optim/verdict of the meeting of {rank}/{number}"


_MEETINGS = _Meetings()


def standstill_of(ranks: Sequence[int], owner: str = "") -> Standstill:
    """Find the record of these ranks, as the whole job numbers them. ``owner``: it has the waits of this one alone."""
    return _ALL.setdefault((owner, *map(str, ranks)), Standstill(ranks, owner))


def whole_of(owner: str) -> str:
    """Give the name of an owner without that of its part, as ", by nodes"."""
    return owner.split(", ")[0]


def _is_on_its_way(wait: Wait, issued: Sequence[Issuances]) -> bool:
    """Tell whether every rank has issued the collective that ``wait`` is for, so that it arrives.

    They have to agree on those before it, too: gloo would hand over one in the place of another.
    """
    of_owner = [dict(of_rank.get(wait.whole, ())) for of_rank in issued]
    if wait.agreeing or not all(numbers and _came_to(wait.number, numbers) for numbers in of_owner):
        return False
    kinds: dict[int, str] = {}
    earlier = ((number, kind) for of in of_owner for number, kind in of.items() if number <= wait.number)
    return all(kinds.setdefault(number, kind) == kind for number, kind in earlier)


def _came_to(number: int, numbers: Mapping[int, str]) -> bool:
    return number in numbers or (len(numbers) == ISSUED_LATELY and number < min(numbers))  # the oldest are not kept


def _reduced(waits: Mapping[int, Wait]) -> str:
    return ", ".join(f"rank {rank} has reduced {wait.rounds}" for rank, wait in waits.items())


def _different_rounds(waits: Mapping[int, Wait]) -> str:
    return (
        f"the ranks wait for each other, and have reduced different numbers of backwards: {_reduced(waits)}. Did one "
        "raise on one of them before its first gradient, or reach none of this optimizer's parameters? Then "
        "call opt.zero_grad() on every rank, or opt.step(), before the next. Make a new optimizer to go on"
    )


def _rounds(waits: Mapping[int, Wait]) -> str:
    if len({wait.whole for wait in waits.values()}) > 1 or len({wait.rounds for wait in waits.values()}) == 1:
        return ""
    return f"Of backwards, {_reduced(waits)}. "


def _different_calls(waits: Mapping[int, Wait]) -> str:
    told = ", ".join(f"rank {rank} in {wait.call or wait.what}" for rank, wait in waits.items())
    calls = " and ".join(sorted({wait.call for wait in waits.values()} - {""}))
    return (
        f"the ranks wait for each other: {told}. Every rank has to call {calls}, at the same place in its program and "
        f"not within `if rank == 0:`. {_rounds(waits)}After a backward that raised on some ranks, all have to call "
        "opt.step(), or all opt.zero_grad(). Make a new optimizer to go on"
    )


def _different_places(waits: Mapping[int, Wait]) -> str:
    told = ", ".join(f"rank {rank} in {wait.what}" for rank, wait in waits.items())
    return (
        f"the ranks wait for each other, in different places: {told}. Has each made as many forwards and backwards? "
        "Did a backward raise on some of them, before it came to a model or an optimizer that the others use in it? "
        "Then step() of that optimizer has to follow on every rank, before the call of any other. Make new optimizers "
        "to go on"
    )


def _different_ranks(met: Mapping[int, tuple[list[int], str, int]]) -> str:
    told = "; ".join(f"rank {rank} with ranks {wanted}, in {what}" for rank, (wanted, what, _) in sorted(met.items()))
    return (
        f"the ranks wait for each other, and were given different ranks to wait for: {told}. Give all of them the same "
        "dimensions of one mesh, as mesh=world_mesh['dp'] and pipeline=world_mesh['pp']"
    )
