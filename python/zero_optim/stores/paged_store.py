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

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..comm.streams import keep_for_current_stream
from ..errors import OffloadError
from .homes import Homes
from .lanes import Lanes
from .offload import SLOTS
from .page import Page, PageState, Slot, laid_out


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
        self._budget = budget  # what resident pages have not taken of it
        self._pages: dict[int, Page] = {}
        self._allocated = self._steps = 0
        self._slots: list[Slot] = []  # the one that was used longest ago in front

    # -- pages ---------------------------------------------------------------------------------------------------

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Tensor] | None = None) -> int:
        own, nbytes = laid_out(page)
        resident = nbytes <= self._budget
        visiting = visiting or {}
        guests, _ = laid_out(visiting, 0 if resident else nbytes)
        made = Page(
            own,
            nbytes,
            {name: (field, visiting[name]) for name, field in guests.items()},
            None if resident else self._homes.make(nbytes),
            dict(page) if resident else {},
            arrived=self._lanes.mark(),
            used=self._lanes.mark(),
            left=self._lanes.mark(),
        )
        if made.home is None:
            self._budget -= nbytes
        else:
            run = made.home.outgoing()
            for name, field in own.items():
                field.of(run).copy_(page[name])
            made.left.set()
            made.home.filled(made.left)
        self._fit_slots(made.moved)
        self._allocated += 1
        self._pages[self._allocated] = made
        return self._allocated

    def release(self, number: int) -> None:
        page = self._pages.pop(number)
        self._send_back(page)
        if page.home is None:
            self._budget += page.nbytes
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
        # A page on a disk takes no slot before it has been read: other pages would wait for the disk, too.
        if self._homes.at_once:
            self._bring(page)

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        page = self._pages[number]
        if not page.moved:
            return page.stays
        if page.state is PageState.HERE:
            raise RuntimeError(f"fetch of page {number}, which is here")
        # It was not prefetched, or another page has wanted its slot since.
        if page.state is PageState.AWAY:
            self._bring(page)
        page.arrived.order_current()
        page.state = PageState.HERE
        return page.tensors()

    def commit(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved:
            return
        run = self._slot_of(page, "commit").run
        # The copy out begins after the update, and the slot is free only after the copy.
        page.used.set()
        lane = self._lanes.to_host
        lane.after(page.used)
        if page.home is not None:
            lane.copy(page.home.outgoing(), run[: page.nbytes])
        for field, home in page.visiting.values():
            lane.copy(home, field.of(run))
        lane.set(page.left)
        if page.home is not None:
            page.home.filled(page.left)
        self.copied.to_host += page.moved
        page.leave_slot(page.left)

    def discard(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved:
            return
        self._slot_of(page, "discard")
        page.used.set()
        # Where it rests is free as soon as the page has come in; the slot, when what has read it there is over.
        if page.home is not None:
            page.home.unchanged(page.arrived)
        page.leave_slot(page.used)

    def wait_for_visitors(self, number: int) -> None:
        page = self._pages[number]
        # Both: a page that was only read has come, and did not go.
        if page.visiting:
            page.arrived.wait()
            page.left.wait()

    def end_step(self) -> None:
        for number in self._pages:
            self.wait_for_visitors(number)
        self._steps += 1
        # Two steps are over, so torch's allocator has what activations need: what is free now stays free.
        if self._room is not None and self._steps == 2:
            self._budget += self._room()
            self.use_room()
            self._budget = 0  # what others have not taken now, they may take later

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

    def _bring(self, page: Page) -> None:
        """Have the page copied into a slot, after what was there has left, and after it has left itself."""
        # The home comes first: where the page is lost it raises, and no slot is taken.
        source = page.home.incoming() if page.home is not None else None
        slot = self._free_slot()
        lane = self._lanes.to_device
        lane.after(slot.free)
        # It may still be on its way out, to the memory that it is now read from: lanes do not wait for each other.
        lane.after(page.left)
        if source is not None:
            lane.copy(slot.run[: page.nbytes], source)
        for field, home in page.visiting.values():
            lane.copy(field.of(slot.run), home)
        lane.set(page.arrived)
        page.take_slot(slot)
        self.copied.to_device += page.moved

    def _free_slot(self) -> Slot:
        """The one that was used longest ago, of those whose page is not here."""
        slot = next((slot for slot in self._slots if slot.page is None), None)
        # Else a page that was prefetched, and is not fetched yet, comes again later.
        slot = slot or next((slot for slot in self._slots if slot.page.state is PageState.COMING), None)  # type: ignore[union-attr]
        if slot is None:
            raise RuntimeError("more pages are fetched at a time than there are slots")
        if slot.page is not None:
            self._send_back(slot.page)
        self._slots.remove(slot)
        self._slots.append(slot)
        return slot

    def _send_back(self, page: Page) -> None:
        """Take the slot of a page that is on its way in: it is not wanted yet, and has to come anew."""
        if page.state is PageState.AWAY:
            return
        if page.state is PageState.HERE:
            raise RuntimeError("a page would lose its slot while it is here")
        # The host waits: its home may be given to others at once, and the lane still reads from there.
        page.arrived.wait()
        if page.home is not None:
            page.home.unchanged(page.arrived)
        page.leave_slot(page.arrived)

    def _slot_of(self, page: Page, event: str) -> Slot:
        if page.state is not PageState.HERE or page.slot is None:
            raise RuntimeError(f"{event} of a page that is {page.state.name}")
        return page.slot

    def _fit_slots(self, nbytes: int) -> None:
        """Make slots for a page of that size, if those that are there are smaller."""
        if nbytes > (self._slots[0].run.nbytes if self._slots else 0):
            self._drop_slots()
            runs = [torch.empty(nbytes, dtype=torch.uint8, device=self.works_on) for _ in range(SLOTS)]
            self._slots = [Slot(run, self._lanes.mark()) for run in runs]
            for slot in self._slots:
                slot.free.set()  # its memory may be what the stream that computes has used before

    def _drop_slots(self) -> None:
        for slot in self._slots:
            if slot.page is not None:
                self._send_back(slot.page)
            # Lanes and the current stream may still use it, and the allocator knows of neither.
            self._lanes.keep(slot.run)
            keep_for_current_stream(slot.run)
        self._slots = []

    def use_room(self) -> None:
        self._let_stay()
        self._homes.trim()

    def _let_stay(self) -> None:
        """Make as many pages resident as fit into what is left of the budget."""
        for page in self._pages.values():
            if page.home is not None and page.nbytes <= self._budget:
                try:
                    run = torch.empty(page.nbytes, dtype=torch.uint8, device=self.works_on)
                except torch.OutOfMemoryError:  # somebody else was faster, or it is in pieces: the page goes on moving
                    break
                page.left.wait()
                run.copy_(page.home.incoming())
                page.home.release()
                self._budget -= page.nbytes
                page.stay(run)
        # The largest that still moves may be smaller than before.
        self._drop_slots()
        self._fit_slots(max((page.moved for page in self._pages.values()), default=0))
