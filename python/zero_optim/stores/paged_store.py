"""Pages in host memory or on a disk, copied to the device around their update.

Two slots on the device are lent in turn. While page 1 is updated, page 2 comes in and page 0 goes out::

    lane in    | page 1 | page 2 |        | page 3 |
    computing           | update 1 | update 2 | update 3 |
    lane out                       | page 1 | page 2 |
    slots        A        B          A        B

The update is that of the device, so what it gives is what it would give without a store, bit by bit. As many pages as
the budget holds never leave the device.

What each call makes of a page that comes and goes:

==========  ======  ======  =====
event       AWAY    COMING  HERE
==========  ======  ======  =====
prefetch    COMING  COMING  HERE
fetch       HERE    HERE    error
commit      error   error   AWAY
discard     error   error   AWAY
send_back   AWAY    AWAY    error
==========  ======  ======  =====

``send_back`` is the store's own: another page wants the slot. A page on a disk has to be read before it can be COMING:
``prefetch`` begins that, and leaves it AWAY.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..comm.streams import keep_for_current_stream
from ..errors import OffloadError
from ..params.layout import round_up
from .lanes import Lanes, Mark
from .offload import SLOT_ALIGNMENT, SLOTS
from .state_store import Copied


class PageState(enum.Enum):
    """What occupies memory: a page that is AWAY has no slot; COMING and HERE, it has."""

    AWAY = enum.auto()
    COMING = enum.auto()
    HERE = enum.auto()


class Home(Protocol):
    """Where one page rests while it is away."""

    def expect(self) -> None:
        """``incoming`` will follow soon."""

    def incoming(self) -> Tensor:
        """[nbytes] uint8 in host memory: the page, to be copied from. Raises OffloadError where it is lost."""

    def unchanged(self, mark: Mark) -> None:
        """What was incoming was only read: it is of no use once the mark has passed."""

    def outgoing(self) -> Tensor:
        """[nbytes] uint8 in host memory, to be copied to."""

    def left(self, mark: Mark) -> None:
        """What is outgoing is there once the mark has passed."""

    def release(self) -> None:
        """The page is of no use any more."""


class Homes(Protocol):
    """Makes homes, and knows what they take.

    Attributes:
        lookahead: how many pages are worth expecting while one is updated.
        at_once: whether an expected page can be copied in at once, or has to be read first.
        copied: what has moved.
    """

    lookahead: int
    at_once: bool
    copied: Copied

    def make(self, nbytes: int) -> Home: ...

    def take_problems(self) -> Mapping[Home, OffloadError]:
        """Why pages could not be written since this was last asked."""

    def trim(self) -> None:
        """Give back host memory that nothing uses."""

    def end_writes(self) -> None:
        """The host waits until nothing is on its way to a disk."""

    def footprint(self) -> Mapping[str, int]:
        """Bytes, by memory: host, disk."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class _Part:
    """A tensor of a page, and where it lies in the page's run of bytes."""

    dtype: torch.dtype
    numel: int
    offset: int

    def of(self, run: Tensor) -> Tensor:
        return run[self.offset : self.offset + self.numel * self.dtype.itemsize].view(self.dtype)


@dataclass(eq=False)
class _Slot:
    run: Tensor  # [bytes] uint8 on the device
    left: Mark  # what was in it last is not needed there any more
    page: _Page | None = None


@dataclass(eq=False)
class _Page:
    """``own`` and ``visiting`` lie in one slot, one after the other. Resident, only what visits does."""

    own: dict[str, _Part]
    nbytes: int  # of ``own``
    visiting: dict[str, tuple[_Part, Tensor]]  # each with the tensor in host memory that it is a copy of
    home: Home | None  # None: resident
    stays: dict[str, Tensor]  # where resident
    arrived: Mark
    used: Mark
    left: Mark
    state: PageState = PageState.AWAY
    slot: _Slot | None = None

    @property
    def moved(self) -> int:
        """Bytes that come and go."""
        visiting = sum(round_up(part.numel * part.dtype.itemsize, SLOT_ALIGNMENT) for part, _ in self.visiting.values())
        return (self.nbytes if self.home is not None else 0) + visiting


class PagedStore:
    """See ``StateStore``.

    Args:
        homes: where pages rest that do not stay.
        budget: bytes of pages that stay on the device at most.
        room: asked once, after the second step, for the bytes of further pages that may stay; None: no more stay.
    """

    keeps_views = False

    def __init__(
        self,
        device: torch.device,
        lanes: Lanes,
        homes: Homes,
        budget: float,
        room: Callable[[], int] | None = None,
    ) -> None:
        self.works_on, self.lookahead, self.copied = device, homes.lookahead, homes.copied
        self.may_lose = not homes.at_once
        self._lanes, self._homes, self._room = lanes, homes, room
        self._left = budget
        self._pages: dict[int, _Page] = {}
        self._allocated = self._steps = 0
        self._slots: list[_Slot] = []

    # -- pages ---------------------------------------------------------------------------------------------------

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        own, nbytes = _laid_out(page, 0)
        resident = nbytes <= self._left
        guests, _ = _laid_out(visiting or {}, 0 if resident else nbytes)
        made = _Page(
            own,
            nbytes,
            {name: (part, (visiting or {})[name]) for name, part in guests.items()},
            None if resident else self._homes.make(nbytes),
            dict(page) if resident else {},
            self._lanes.mark(),
            self._lanes.mark(),
            self._lanes.mark(),
        )
        if made.home is None:
            self._left -= nbytes
        else:
            run = made.home.outgoing()
            for name, part in own.items():
                part.of(run).copy_(page[name])
            made.left.set()
            made.home.left(made.left)
        self._fit_slots(made.moved)
        self._allocated += 1
        self._pages[self._allocated] = made
        return self._allocated

    def release(self, number: int) -> None:
        page = self._pages.pop(number)
        self._send_back(page)
        if page.home is None:
            self._left += page.nbytes
            keep_for_current_stream(*page.stays.values())
        else:
            page.arrived.wait()  # then others may write where it rested
            page.left.wait()
            page.home.release()
        if not self._pages:
            self._drop_slots()

    def prefetch(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved or page.state is not PageState.AWAY:
            return
        if page.home is not None:
            page.home.expect()
        if self._homes.at_once:
            self._bring(page)

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        page = self._pages[number]
        if not page.moved:
            return page.stays
        if page.state is PageState.HERE:
            raise RuntimeError(f"fetch of page {number}, which is here")
        if page.state is PageState.AWAY:
            self._bring(page)
        page.arrived.order_current()
        page.state = PageState.HERE
        assert page.slot is not None
        run, own = page.slot.run, page.own if page.home is not None else {}
        here = {name: part.of(run) for name, part in own.items()}
        return {**page.stays, **here, **{name: part.of(run) for name, (part, _) in page.visiting.items()}}

    def commit(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved:
            return
        run = self._slot_of(page, "commit").run
        page.used.set()
        lane = self._lanes.to_host
        lane.after(page.used)
        if page.home is not None:
            lane.copy(page.home.outgoing(), run[: page.nbytes])
        for part, home in page.visiting.values():
            lane.copy(home, part.of(run))
        lane.set(page.left)
        if page.home is not None:
            page.home.left(page.left)
        self.copied.to_host += page.moved
        self._leave_slot(page, page.left)

    def discard(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved:
            return
        self._slot_of(page, "discard")
        page.used.set()
        if page.home is not None:
            page.home.unchanged(page.arrived)
        self._leave_slot(page, page.used)

    def wait_for_visitors(self, number: int) -> None:
        page = self._pages[number]
        if page.visiting:
            page.arrived.wait()
            page.left.wait()

    def end_step(self) -> None:
        for number in self._pages:
            self.wait_for_visitors(number)
        self._steps += 1
        if self._room is not None and self._steps == 2:
            self._left += self._room()
            self.take_in()
            self._left = 0  # what others have not taken now, they may take later

    def take_problems(self) -> Mapping[int, OffloadError]:
        problems = self._homes.take_problems()
        if not problems:
            return {}
        homes = {number: page.home for number, page in self._pages.items() if page.home is not None}
        return {number: problems[home] for number, home in homes.items() if home in problems}

    def wait(self) -> None:
        """The host waits until every page that was committed has arrived where it rests."""
        for page in self._pages.values():
            page.left.wait()
        self._homes.end_writes()

    def footprint(self) -> Mapping[str, int]:
        resident = sum(page.nbytes for page in self._pages.values() if page.home is None)
        return {"device": resident + sum(slot.run.nbytes for slot in self._slots), **self._homes.footprint()}

    def close(self) -> None:
        for number in list(self._pages):
            self.release(number)
        self._homes.close()

    def state_of(self, number: int) -> PageState:
        return self._pages[number].state

    # -- slots ---------------------------------------------------------------------------------------------------

    def _bring(self, page: _Page) -> None:
        """Have the page copied into a slot, after what was there has left, and after it has left itself."""
        source = page.home.incoming() if page.home is not None else None
        slot = self._free_slot()
        lane = self._lanes.to_device
        lane.after(slot.left)
        lane.after(page.left)
        if source is not None:
            lane.copy(slot.run[: page.nbytes], source)
        for part, home in page.visiting.values():
            lane.copy(part.of(slot.run), home)
        lane.set(page.arrived)
        page.state, page.slot, slot.page = PageState.COMING, slot, page
        self.copied.to_device += page.moved

    def _free_slot(self) -> _Slot:
        """The one that was used longest ago, of those whose page is not here."""
        slot = next((slot for slot in self._slots if slot.page is None), None)
        slot = slot or next((slot for slot in self._slots if slot.page.state is PageState.COMING), None)  # type: ignore[union-attr]
        if slot is None:
            raise RuntimeError("more pages are fetched at a time than there are slots")
        if slot.page is not None:
            self._send_back(slot.page)
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def _send_back(self, page: _Page) -> None:
        """A page on its way in is not wanted yet: it has to come anew."""
        if page.state is PageState.AWAY:
            return
        if page.state is PageState.HERE:
            raise RuntimeError("a page would lose its slot while it is here")
        page.arrived.wait()
        if page.home is not None:
            page.home.unchanged(page.arrived)
        self._leave_slot(page, page.arrived)

    def _slot_of(self, page: _Page, event: str) -> _Slot:
        if page.state is not PageState.HERE or page.slot is None:
            raise RuntimeError(f"{event} of a page that is {page.state.name}")
        return page.slot

    def _leave_slot(self, page: _Page, left: Mark) -> None:
        if page.slot is not None:
            page.slot.left, page.slot.page = left, None
            page.slot, page.state = None, PageState.AWAY

    def _fit_slots(self, nbytes: int) -> None:
        """Make slots for a page of that size, if those that are there are smaller."""
        if nbytes > (self._slots[0].run.nbytes if self._slots else 0):
            self._drop_slots()
            runs = [torch.empty(nbytes, dtype=torch.uint8, device=self.works_on) for _ in range(SLOTS)]
            self._slots = [_Slot(run, self._lanes.mark()) for run in runs]
            for slot in self._slots:
                slot.left.set()  # its memory may be what the stream that computes has used before

    def _drop_slots(self) -> None:
        for slot in self._slots:
            if slot.page is not None:
                self._send_back(slot.page)
            self._lanes.keep(slot.run)
            keep_for_current_stream(slot.run)
        self._slots = []

    def take_in(self) -> None:
        self._let_stay()
        self._homes.trim()

    def _let_stay(self) -> None:
        """As many pages as fit into what is left of the budget."""
        for page in self._pages.values():
            if page.home is not None and page.nbytes <= self._left:
                try:
                    run = torch.empty(page.nbytes, dtype=torch.uint8, device=self.works_on)
                except torch.OutOfMemoryError:  # somebody else was faster, or it is in pieces: the page goes on moving
                    break
                page.left.wait()
                run.copy_(page.home.incoming())
                page.home.release()
                self._left -= page.nbytes
                page.home, page.stays = None, {name: part.of(run) for name, part in page.own.items()}
                visiting, _ = _laid_out({name: home for name, (_, home) in page.visiting.items()}, 0)
                page.visiting = {name: (part, page.visiting[name][1]) for name, part in visiting.items()}
        self._drop_slots()
        self._fit_slots(max((page.moved for page in self._pages.values()), default=0))


def _laid_out(tensors: Mapping[str, Tensor], start: int) -> tuple[dict[str, _Part], int]:
    """Where each lies, one after another from ``start`` on; and where the last one ends."""
    parts, end = {}, round_up(start, SLOT_ALIGNMENT)
    for name, tensor in tensors.items():
        parts[name] = _Part(tensor.dtype, tensor.numel(), end)
        end = round_up(end + tensor.nbytes, SLOT_ALIGNMENT)
    return parts, end
