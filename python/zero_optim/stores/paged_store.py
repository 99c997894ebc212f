"""Pages in host memory or on a disk, copied to the device around their update.

Two frames on the device are lent in turn. While page 1 is updated, page 2 comes in and page 0 goes out::

    lane in    | page 1 | page 2 |        | page 3 |
    computing           | update 1 | update 2 | update 3 |
    lane out                       | page 1 | page 2 |
    frames        A        B          A        B

The update runs on the device, so it gives the same bits as without a store. As many pages as the budget holds never
leave the device.

The state of a page that moves, after each call:

==========  ======  ======  =====
event       AWAY    COMING  HERE
==========  ======  ======  =====
prefetch    COMING  COMING  HERE
fetch       HERE    HERE    error
commit      error   error   AWAY
discard     error   error   AWAY
send_back   AWAY    AWAY    error
==========  ======  ======  =====

``send_back`` is internal: another page needs the frame. A page on a disk has to be read before it can be COMING:
``prefetch`` begins the read, and leaves the page AWAY.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..comm.storage import is_there
from ..comm.streams import keep_for_current_stream
from ..errors import OffloadError
from .homes import Homes
from .lanes import Lanes
from .offload import FRAMES
from .page import Frame, Page, PageState, laid_out


class PagedStore:
    """See ``StateStore``.

    Args:
        homes: where the pages that move rest.
        budget: the most bytes of pages that stay on the device.
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
        self._budget = budget  # bytes that resident pages have not taken
        self._pages: dict[int, Page] = {}
        self._allocated = self._steps = 0
        self._frames: list[Frame] = []  # least recently used first

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
        self._fit_frames(made.moved)
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
            page.arrived.wait()  # no copy may use the home any more: others get its memory
            page.left.wait()
            page.home.release()
        if not self._pages:
            self.drop_frames()

    def prefetch(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved or page.state is not PageState.AWAY:
            return
        if page.home is not None:
            page.home.expect()
        # A page on a disk takes no frame before it has been read: other pages would wait for the disk, too.
        if self._homes.at_once:
            self._bring(page)

    def fetch(self, number: int) -> Mapping[str, Tensor]:
        page = self._pages[number]
        if not page.moved:
            return page.stays
        if page.state is PageState.HERE:
            raise RuntimeError(f"fetch of page {number}, which is here")
        # The page was not prefetched, or another page has taken its frame since.
        if page.state is PageState.AWAY:
            self._bring(page)
        page.arrived.order_current()
        page.state = PageState.HERE
        return page.tensors()

    def commit(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved:
            return
        run = self._frame_of(page, "commit").run
        # The copy out begins after the update, and the frame is free only after the copy.
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
        page.leave_frame(page.left)

    def discard(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved:
            return
        self._frame_of(page, "discard")
        page.used.set()
        # The home's memory is free once the page has come in; the frame, once its readers on the device are done.
        if page.home is not None:
            page.home.unchanged(page.arrived)
        page.leave_frame(page.used)

    def wait_for_visitors(self, number: int) -> None:
        page = self._pages[number]
        # Both marks: a page that was only read was copied in, and not out.
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
            self._budget = 0  # the rest is for others, who may take it later

    def take_problems(self) -> Mapping[int, OffloadError]:
        problems = self._homes.take_problems()
        if not problems:
            return {}
        homes = {number: page.home for number, page in self._pages.items() if page.home is not None}
        return {number: problems[home] for number, home in homes.items() if home in problems}

    def wait(self) -> None:
        """Block the host until every committed page has arrived at its home."""
        for page in self._pages.values():
            page.left.wait()
        self._homes.end_writes()

    def residents(self) -> list[Tensor]:
        return [tensor for page in self._pages.values() for tensor in page.stays.values()]

    def footprint(self) -> Mapping[str, int]:
        stay = [page for page in self._pages.values() if page.home is None]
        resident = sum(page.nbytes for page in stay if all(map(is_there, page.stays.values())))
        return {"device": resident + sum(frame.run.nbytes for frame in self._frames), **self._homes.footprint()}

    def close(self) -> None:
        for number in list(self._pages):
            self.release(number)
        self._homes.close()

    def state_of(self, number: int) -> PageState:
        return self._pages[number].state

    # -- frames ---------------------------------------------------------------------------------------------------

    def _bring(self, page: Page) -> None:
        """Copy the page into a frame, after the frame's last page has left it, and after its own copy out."""
        # The home comes first: it raises where the page is lost, and no frame is taken.
        source = page.home.incoming() if page.home is not None else None
        frame = self._free_frame()
        lane = self._lanes.to_device
        lane.after(frame.free)
        # The page's copy out to this same memory may still run: lanes do not wait for each other.
        lane.after(page.left)
        if source is not None:
            lane.copy(frame.run[: page.nbytes], source)
        for field, home in page.visiting.values():
            lane.copy(field.of(frame.run), home)
        lane.set(page.arrived)
        page.take_frame(frame)
        self.copied.to_device += page.moved

    def _free_frame(self) -> Frame:
        """Take the least recently used frame whose page is not HERE."""
        frame = next((frame for frame in self._frames if frame.page is None), None)
        # Else that of a page which was prefetched, and is not fetched yet: the page is copied in again later.
        frame = frame or next((frame for frame in self._frames if frame.page.state is PageState.COMING), None)  # type: ignore[union-attr]
        if frame is None:
            raise RuntimeError("more pages are fetched at a time than there are frames")
        if frame.page is not None:
            self._send_back(frame.page)
        self._frames.remove(frame)
        self._frames.append(frame)
        return frame

    def _send_back(self, page: Page) -> None:
        """Take the frame from a page that is COMING: nothing uses the page yet, and it is copied in again later."""
        if page.state is PageState.AWAY:
            return
        if page.state is PageState.HERE:
            raise RuntimeError("a page would lose its frame while it is here")
        # The host waits: the lane still reads the home's memory, which others may get at once.
        page.arrived.wait()
        if page.home is not None:
            page.home.unchanged(page.arrived)
        page.leave_frame(page.arrived)

    def _frame_of(self, page: Page, event: str) -> Frame:
        if page.state is not PageState.HERE or page.frame is None:
            raise RuntimeError(f"{event} of a page that is {page.state.name}")
        return page.frame

    def _fit_frames(self, nbytes: int) -> None:
        """Make frames for a page of that size, if those that are there are smaller."""
        if nbytes > (self._frames[0].run.nbytes if self._frames else 0):
            self.drop_frames()
            runs = [torch.empty(nbytes, dtype=torch.uint8, device=self.works_on) for _ in range(FRAMES)]
            self._frames = [Frame(run, self._lanes.mark()) for run in runs]
            for frame in self._frames:
                frame.free.set()  # the computing stream may have used its memory before

    def drop_frames(self) -> None:
        for frame in self._frames:
            if frame.page is not None:
                self._send_back(frame.page)
            # Lanes and the current stream may still use it, and the allocator knows of neither.
            self._lanes.keep(frame.run)
            keep_for_current_stream(frame.run)
        self._frames = []

    def use_room(self) -> None:
        self._let_stay()
        self._homes.trim()

    def _let_stay(self) -> None:
        """Make as many pages resident as fit into what is left of the budget."""
        for page in self._pages.values():
            if page.home is not None and page.nbytes <= self._budget:
                try:
                    run = torch.empty(page.nbytes, dtype=torch.uint8, device=self.works_on)
                except torch.OutOfMemoryError:  # taken by others, or fragmented: the page goes on moving
                    break
                page.left.wait()
                run.copy_(page.home.incoming())
                page.home.release()
                self._budget -= page.nbytes
                page.stay(run)
        # The largest page that still moves may be smaller than before, and frames with it.
        self.drop_frames()
        self.make_frames()

    def make_frames(self) -> None:
        self._fit_frames(max((page.moved for page in self._pages.values()), default=0))
