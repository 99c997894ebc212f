"""Deadlock detector for gloo process groups: ranks that wait for each other raise within seconds, on all of them.

Ranks deadlock where they launch different numbers of collectives, wait in different groups, take one collective for
another, or were given different ranks. By default that would last for half an hour::

    rank 0   backward: raises           backward   step: the norm     waits for rank 1
    rank 1   backward (one round)       backward   step: its round 2  waits for rank 0

After some seconds of waiting a rank writes where it waits into the job's store, and reads where the others wait. It
follows the ranks that it waits for, those that these wait for, and so on. All of them are deadlocked if all wait,
unchanged over several looks, and for none of them is the collective in flight.

Under gloo alone: on CUDA the host does not wait.
"""

from __future__ import annotations

import contextlib
import functools
import json
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import astuple, dataclass
from typing import Protocol

import torch.distributed as dist

from .. import user_thread
from ..errors import CollectiveError, RankMismatchError
from .groups import Groups
from .handle import Handle, Work, did_not_complete
from .transport import GLOO

SECONDS = 2.0  # between two looks: a step that waits for less costs nothing
ANSWER_SECONDS = 5.0  # for the store to answer; a slow answer is read at the next look
LOOKS = 4  # at which all ranks must be found unchanged before one raises
ISSUED_LATELY = 1024  # collectives of which a rank remembers kind and size, of each owner

Issued = Sequence[tuple[int, str]]
"""The number of each collective that a rank has issued lately, and its kind and size."""


@dataclass(frozen=True)
class Wait:
    """The place at which a rank waits.

    Attributes:
        ranks: that take part, as the whole job numbers them.
        owner: the optimizer, or sharded model, that waits; see ``Comm.owner``.
        rounds: launched by this rank there. Ranks that only lag behind show equal numbers as soon as they catch up.
        what: the collective, for people.
        number: of this collective among those that the rank has issued there: all ranks issue them in one order.
        given: whether it goes over the given group, as in loading.
        call: the call that every rank has to make, as "full_state_dict"; "": none.
    """

    ranks: Sequence[int]
    owner: str
    rounds: int
    what: str
    number: int = 0
    given: bool = False
    call: str = ""

    @property
    def whole(self) -> str:
        """The owner, without the name of a part, as ", by nodes"."""
        return self.owner.split(", ")[0]


@dataclass(frozen=True)
class Deadlock:
    """A deadlock: the message, the owners of the waits (``Wait.whole``), and the owner for which some ranks wait over
    the given group, where others have not come; "": there is none."""

    text: str
    owners: Sequence[str] = ()
    meeting: str = ""


class Watched(Protocol):
    """``Comm``, as far as its waits are watched."""

    label: str
    log: Log
    groups: Groups

    @property
    def whole(self) -> Watched: ...

    @property
    def owner(self) -> str: ...

    @property
    def ranks(self) -> list[int]: ...

    def abandon(self) -> None: ...


_comms: weakref.WeakSet[Watched] = weakref.WeakSet()


class Log:
    """The collectives that this rank has issued for an optimizer or a sharded model, numbered alike on all ranks.

    Attributes:
        rounds: of reductions that this rank has launched.
        failed: whether a collective has failed: the groups are of no use any more.
        deadlock: the message of the deadlock that these ranks were in; None: they never were.
    """

    def __init__(self, comm: Watched) -> None:
        self.rounds = 0
        self.failed = False
        self.deadlock: str | None = None
        self._number = 0
        self._lately: dict[int, tuple[str, int]] = {}
        _comms.add(comm)

    def reserve(self) -> int:
        """Number a collective that is issued later: so all ranks number it alike, whenever each of them issues it."""
        self._number += 1
        return self._number

    def issue(self, kind: str, nbytes: int, number: int | None = None) -> int:
        """Record a collective. ``number``: the one that was reserved for it. Returns its number."""
        number = self.reserve() if number is None else number
        self._lately[number] = kind, nbytes
        if len(self._lately) > ISSUED_LATELY:
            del self._lately[next(iter(self._lately))]
        return number

    def issued(self) -> Issued:
        # Copied first: another thread may issue meanwhile.
        return [(number, f"{kind} of {nbytes}") for number, (kind, nbytes) in [*self._lately.items()]]

    def check(self) -> None:
        """Raise RankMismatchError, at once, where these ranks were in a deadlock before."""
        if self.deadlock is not None:
            raise RankMismatchError(
                "ranks are out of sync after an earlier error; make a new optimizer, and at stage 3 a new model, to go "
                f"on. The error was: {self.deadlock}"
            )


class Watch:
    """Waits on the host for a collective of ``comm``, and raises where the ranks are deadlocked.

    ``number``: of the collective in the log. ``given``: whether it goes over the given group; else over the own one.
    """

    def __init__(self, comm: Watched, number: int = 0, *, given: bool = False) -> None:
        self.comm, self._number, self._given = comm, number, given

    def hold(self, handle: Handle, work: Work) -> None:
        """Wait for the ``work`` of ``handle``. Raises RankMismatchError in a deadlock, CollectiveError where the
        collective has failed."""
        comm, record = self.comm, _record_of(self.comm)
        try:
            if not handle.leg_arrives_within(0):
                comm.log.check()
            while not handle.leg_arrives_within(SECONDS):
                what = f"{handle.traffic.kind} of {comm.label if handle.of is None else f'{handle.of} of {comm.label}'}"
                ranks = comm.ranks if self._given else comm.whole.ranks
                wait = Wait(ranks, comm.owner, comm.log.rounds, what, self._number, self._given, handle.call)
                if (found := record.look(wait, _with_others(comm))) is not None:
                    raise self._stop(found)
            work.wait()  # raises where the collective has failed
            # A rank that has found a deadlock still joins this meeting, so its end may mean nothing: see ``_stop``.
            if (found := record.end()) is not None and self._given:
                raise self._stop(found)
        except BaseException as error:
            # The ranks may have issued different numbers of collectives by now, so the next would be taken for another.
            comm.abandon()
            found = record.end()
            # Ctrl-C; or this rank has found the deadlock: its message says more than the one below.
            if isinstance(error, RankMismatchError) or not isinstance(error, RuntimeError):
                raise
            # Another rank may have found it, and left: then the lost connection is not the cause.
            if found is not None:
                raise self._stop(found) from error
            raise CollectiveError(did_not_complete(handle.traffic.kind, error, handle.call)) from error

    def _stop(self, found: Deadlock) -> RankMismatchError:
        """Stop every comm that has deadlocked, and return the error.

        Such comms send nothing more over their own groups: another rank would take it for something else, or not at
        all. The given group stays in use, for new optimizers.
        """
        for comm in _with_others(self.comm):
            own_name = comm.groups.own_name
            if comm is self.comm.whole or own_name in found.owners:
                comm.log.deadlock = found.text
                comm.abandon()
            # Others wait over the given group, and this rank has not come. It comes now: else they would take its next
            # meeting for this one.
            if own_name and own_name == found.meeting and not self._given:
                GLOO.barrier(comm.groups.given)
        return RankMismatchError(found.text)


def _with_others(comm: Watched) -> set[Watched]:
    """The whole of ``comm``, and all others of this rank that have a group of their own."""
    while True:
        with contextlib.suppress(RuntimeError):  # another thread has made one, or closed one, meanwhile
            return {comm.whole, *(of for of in [*_comms] if of.whole is of and of.groups.has_own)}


class Record:
    """This rank's entry in the job's store: where it waits. One for the main thread; another thread has one for its
    own optimizer, and looks at that of the same optimizer on other ranks: other threads' waits mean nothing for it."""

    def __init__(self, owner: str = "") -> None:
        self._of = f" for {owner}" if owner else ""
        self._number = 0  # of this rank's waits
        self._seen: Mapping[int, str] = {}
        self._looks = 0
        self._written = False
        self._look: Future[Deadlock | None] | None = None  # the one that is going on
        self._asked = False  # whether there was a look in this wait

    def look(self, wait: Wait, comms: Iterable[Watched]) -> Deadlock | None:
        """Write this rank's ``wait``, with what it has issued for ``comms``, and read the others' waits. Call it after
        every ``SECONDS`` of waiting. Returns the deadlock, on each of its ranks; None: there is none."""
        # On a thread: the store's sockets have no time-out. Where its host is lost, the collective's own ends the wait.
        self._asked = True
        if self._look is None:
            self._look = _on_a_thread(lambda: self._compare(wait, comms))
        found = _answer(self._look)
        self._look = None if self._look.done() else self._look
        return found

    def _compare(self, wait: Wait, comms: Iterable[Watched]) -> Deadlock | None:
        store, rank = _store(), dist.get_rank()
        if (found := self._found()) is not None:
            return found
        if not self._written:
            self._number += 1
            issued = {comm.owner: comm.log.issued() for comm in comms}
            # Before the wait: whoever reads the wait reads this, too.
            store.set(self._key("issued", rank), json.dumps(issued))
            store.set(self._key("wait", rank), json.dumps([astuple(wait), self._number]))
            self._written = True
        now = self._waits()
        self._looks = self._looks + 1 if now and now == self._seen else 0
        self._seen = now
        return self._judge(now) if self._looks == LOOKS else None  # once: what it judges by does not change

    def _waits(self) -> Mapping[int, str]:
        """The waits, by rank, of all that this rank waits for, directly or not; none where one of these computes."""
        found: dict[int, str] = {}
        more = [dist.get_rank()]
        while more:
            keys = [self._key("wait", rank) for rank in more]
            # A rank without an entry has never waited; that of a rank which waits no more is empty.
            if not _store().check(keys) or "" in (entries := [_store().get(key).decode() for key in keys]):
                return {}
            found |= zip(more, entries, strict=True)
            more = sorted({rank for entry in entries for rank in json.loads(entry)[0][0]} - found.keys())
        return found

    def _judge(self, entries: Mapping[int, str]) -> Deadlock | None:
        """Judge ranks that have all waited for long, with nothing changed."""
        read = {rank: json.loads(entry) for rank, entry in sorted(entries.items())}
        waits = {rank: Wait(*wait) for rank, (wait, _) in read.items()}
        issued = {rank: json.loads(_store().get(self._key("issued", rank)).decode()) for rank in waits}
        if any(_is_in_flight(wait, waits, issued) for wait in waits.values()):
            return None
        meetings = {wait.owner for wait in waits.values() if wait.given}
        owners = [*{wait.whole: None for wait in waits.values()}]
        found = Deadlock(_explain(waits), owners, meetings.pop() if len(meetings) == 1 else "")
        for rank, (_, number) in read.items():  # this rank may be gone before another looks
            _store().set(self._key(f"deadlock {number}", rank), json.dumps(astuple(found)))
        return found

    def _found(self) -> Deadlock | None:
        """Read the deadlock that another rank has found during this rank's present wait."""
        key = self._key(f"deadlock {self._number}", dist.get_rank())
        return Deadlock(*json.loads(_store().get(key).decode())) if self._written and _store().check([key]) else None

    def end(self) -> Deadlock | None:
        """End this rank's wait. Returns the deadlock that another rank has found during it."""
        if not self._asked:
            return None
        self._asked, self._look = False, None
        return _answer(_on_a_thread(self._end))  # after a look that is going on

    def _end(self) -> Deadlock | None:
        found = None
        if self._written:
            with contextlib.suppress(RuntimeError, ValueError):  # the store has gone, with its rank or with the group
                found = self._found()
                _store().set(self._key("wait", dist.get_rank()), "")
            self._written, self._seen, self._looks = False, {}, 0
        return found

    def _key(self, what: str, rank: int) -> str:
        return f"zero_optim/{what} of {rank}{self._of}"


_records = functools.cache(Record)  # by owner


@functools.cache
def _calls() -> queue.SimpleQueue[tuple[Callable[[], Deadlock | None], Future[Deadlock | None]]]:
    """The queue of a thread that talks to the store, in order. A daemon: the process ends where the store is silent."""
    calls: queue.SimpleQueue[tuple[Callable[[], Deadlock | None], Future[Deadlock | None]]] = queue.SimpleQueue()

    def work() -> None:
        while True:
            call, answer = calls.get()
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

    threading.Thread(target=work, name="zero_optim deadlock detector", daemon=True).start()
    return calls


def _on_a_thread(call: Callable[[], Deadlock | None]) -> Future[Deadlock | None]:
    answer: Future[Deadlock | None] = Future()
    _calls().put((call, answer))
    return answer


def _answer(asked: Future[Deadlock | None]) -> Deadlock | None:
    """Wait for the answer; None where there is none in time."""
    try:
        return asked.result(ANSWER_SECONDS)
    except FutureTimeout:
        return None


def _record_of(comm: Watched) -> Record:
    return _records(comm.owner if user_thread.is_beside() else "")


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _is_in_flight(wait: Wait, waits: Mapping[int, Wait], issued: Mapping[int, Mapping[str, Issued]]) -> bool:
    """Whether every rank has issued the collective that ``wait`` is for, so that it arrives: over a slow connection,
    say, for which there is the group's own time-out. The ranks wait for it, or have issued it and gone on.

    They have to agree on those before it, too: gloo would hand over one in the place of another.
    """
    if all(astuple(waits[rank]) == astuple(wait) for rank in wait.ranks):
        return True
    if wait.given:
        return False
    kinds: dict[int, str] = {}  # of this collective and those before it, by number
    for rank in wait.ranks:
        of_rank = dict(issued[rank].get(wait.whole, ()))
        is_forgotten = len(of_rank) == ISSUED_LATELY and wait.number < min(of_rank)
        if wait.number not in of_rank and not is_forgotten:
            return False
        earlier = [(number, kind) for number, kind in of_rank.items() if number <= wait.number]
        if any(kinds.setdefault(number, kind) != kind for number, kind in earlier):
            return False
    return True


def _explain(waits: Mapping[int, Wait]) -> str:
    """The message for ranks that wait like this."""
    of = waits.values()
    start = "the ranks wait for each other"
    if all(wait.given for wait in of) and len({tuple(wait.ranks) for wait in of}) > 1:
        ranks = "; ".join(f"rank {rank} with ranks {[*w.ranks]}, in {w.call or w.what}" for rank, w in waits.items())
        return (
            f"{start}, and were given different ranks to wait for: {ranks}. Give all of them the same dimensions of "
            "one mesh, as mesh=world_mesh['dp'] and pipeline=world_mesh['pp']"
        )
    places = ", ".join(f"rank {rank} in {wait.call or wait.what}" for rank, wait in waits.items())
    counts = ", ".join(f"rank {rank} has reduced {wait.rounds}" for rank, wait in waits.items())
    one_owner_apart = len({wait.whole for wait in of}) == 1 and len({wait.rounds for wait in of}) > 1
    if len({wait.call for wait in of}) > 1:
        calls = " and ".join(sorted({wait.call for wait in of} - {""}))
        return (
            f"{start}: {places}. Every rank has to call {calls}, at the same place in its program and not within "
            f"`if rank == 0:`. {f'Of backwards, {counts}. ' if one_owner_apart else ''}After a backward that raised on "
            "some ranks, all have to call opt.step(), or all opt.zero_grad(). Make a new optimizer to go on"
        )
    if one_owner_apart:
        return (
            f"{start}, and have reduced different numbers of backwards: {counts}. Did one raise on one of them before "
            "its first gradient, or reach none of this optimizer's parameters? Then call opt.zero_grad() on every "
            "rank, or opt.step(), before the next. Make a new optimizer to go on"
        )
    return (
        f"{start}, in different places: {places}. Has each made as many forwards and backwards? Did a backward raise "
        "on some of them, before it came to a model or an optimizer that the others use in it? Then step() of that "
        "optimizer has to follow on every rank, before the call of any other. Make new optimizers to go on"
    )
