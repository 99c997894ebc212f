"""Pages in host memory or on a disk, copied to the device around their update.

Two frames on the device are used in turn. While page 1 is updated, page 2 comes in and page 0 goes out::

    lane in    | page 1 | page 2 |        | page 3 |
    computing           | update 1 | update 2 | update 3 |
    lane out                       | page 1 | page 2 |
    frames        A        B          A        B

The update runs on the device, so it gives the same bits as without a store. As many pages as the budget holds never
leave the device.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..comm.streams import is_there, keep_for_current_stream
from ..params.layout import round_up
from .disk_pages import DiskBacking, DiskPage
from .host_memory import HostMemory, Lanes, Mark
from .offload import FRAME_ALIGNMENT, FRAMES, Copied, Offload, Tier
from .state_store import DeviceStore, HostStore, StateStore

_RESERVE = 0.05
"""Fraction of the device's memory that a budget of "auto" leaves free: for fragments, and for larger steps."""


class HostPage:
    """A page of a ``HostBacking``. The calls are those of every backing's pages."""

    at_once = True  # else it has to be read first

    def __init__(self, memory: HostMemory, run: Tensor) -> None:
        self._memory, self._run = memory, run

    def prefetch(self) -> None:
        """Prepare for ``fetch``, which will follow soon. Raises OffloadError as ``fetch``."""

    def fetch(self) -> Tensor:
        """Give the page, to be copied from: [nbytes] uint8 in host memory. Raises OffloadError where it is lost."""
        return self._run

    def discard(self, mark: Mark) -> None:
        """End ``fetch`` of a page that was only read. Nobody reads the memory once the mark has passed."""

    def overwrite(self) -> Tensor:
        """Give memory to copy the whole page to, with ``fetch`` or without: [nbytes] uint8 on the host. Raises
        OffloadError where the page was not fetched and the backing has lost pages."""
        return self._run

    def commit(self, mark: Mark) -> None:
        """End ``overwrite``: the page is in that memory once the mark has passed."""

    def release(self) -> None:
        """Forget the page."""
        self._memory.give_back(self._run)


class PartOfPage(HostPage):
    """A part of a page, which is read and written with all of it."""

    def __init__(self, page: HostPage | DiskPage, start: int, nbytes: int) -> None:
        self._page, self._start, self._nbytes, self.at_once = page, start, nbytes, page.at_once

    def prefetch(self) -> None:
        self._page.prefetch()

    def fetch(self) -> Tensor:
        return self._page.fetch().narrow(0, self._start, self._nbytes)

    def overwrite(self) -> Tensor:
        return self._page.overwrite().narrow(0, self._start, self._nbytes)  # it was fetched: the rest stays

    def commit(self, mark: Mark) -> None:
        self._page.commit(mark)

    def discard(self, mark: Mark) -> None:
        self._page.discard(mark)


class HostBacking:
    """Holds the pages of a store in host memory while they are away from the device. ``DiskBacking`` has the same face.

    Attributes:
        lookahead, copied: as those of ``StateStore``.
        at_once: whether a prefetched page can be copied in at once, or has to be read first.
        memory: the host memory that it takes.
        disk_bytes: those that it takes of a disk.
    """

    lookahead, at_once, disk_bytes = 1, True, 0

    def __init__(self, memory: HostMemory) -> None:
        self.memory, self.copied = memory, Copied()

    def allocate(self, nbytes: int) -> HostPage:
        return HostPage(self.memory, self.memory.take(nbytes))

    def close(self) -> None: ...


class PageState(enum.Enum):
    """The place of a page: AWAY without a frame; COMING, copied into its frame; or HERE, fetched.

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

    AWAY = enum.auto()
    COMING = enum.auto()
    HERE = enum.auto()


@dataclass(frozen=True)
class Field:
    """A tensor of a page, and where it lies in the page's run of bytes."""

    dtype: torch.dtype
    numel: int
    offset: int

    def of(self, run: Tensor) -> Tensor:
        return run[self.offset : self.offset + self.numel * self.dtype.itemsize].view(self.dtype)


def laid_out(tensors: Mapping[str, Tensor], start: int = 0) -> tuple[dict[str, Field], int]:
    """Lay tensors one after another from ``start`` on. Returns where each lies, and where the last one ends."""
    fields, end = {}, round_up(start, FRAME_ALIGNMENT)
    for name, tensor in tensors.items():
        fields[name] = Field(tensor.dtype, tensor.numel(), end)
        end = round_up(end + tensor.nbytes, FRAME_ALIGNMENT)
    return fields, end


@dataclass(eq=False)
class Frame:
    """A place on the device that pages take turns in."""

    run: Tensor  # [bytes] uint8 on the device
    free: Mark  # once it has passed, the frame may be overwritten
    page: Page | None = None


@dataclass(eq=False)
class Page:
    """A page of state, and the tensors that visit the device with it. Both lie in one frame, one after the other.

    A resident page stays on the device, and has no backing: only its visiting tensors move.
    """

    own: dict[str, Field]
    nbytes: int  # of ``own``
    visiting: dict[str, tuple[Field, HostPage | DiskPage]]  # each with the page that it is a copy of
    backing: HostPage | DiskPage | None  # None: resident
    stays: Mapping[str, Tensor]  # of a resident page
    arrived: Mark  # it was copied into its frame
    used: Mark  # it was updated, or read
    left: Mark  # it was copied out of its frame
    state: PageState = PageState.AWAY
    frame: Frame | None = None

    @property
    def moved(self) -> int:
        """Bytes that are copied in for an update, and out after it."""
        visiting = sum(round_up(of.numel * of.dtype.itemsize, FRAME_ALIGNMENT) for of, _ in self.visiting.values())
        return (self.nbytes if self.backing is not None else 0) + visiting

    @property
    def rests(self) -> list[HostPage | DiskPage]:
        """Where the page and what visits with it rest, away from the device."""
        return [*([] if self.backing is None else [self.backing]), *(rests for _, rests in self.visiting.values())]

    def leave_frame(self, free: Mark) -> None:
        """Leave the frame, which is free once the mark has passed."""
        if self.frame is not None:
            self.frame.free, self.frame.page = free, None
            self.frame, self.state = None, PageState.AWAY


class PagedStore(StateStore):
    """See ``StateStore``.

    Args:
        backing: where the pages that move rest.
        budget: the most bytes of pages that stay on the device.
        room: asked once, after the second step, for the bytes of further pages that may stay; None: no more stay.
    """

    def __init__(
        self,
        device: torch.device,
        lanes: Lanes,
        backing: HostBacking | DiskBacking,
        budget: float,
        room: Callable[[], int] | None = None,
    ) -> None:
        super().__init__()
        self.works_on, self.lookahead, self.copied = device, backing.lookahead, backing.copied
        self.may_lose = not backing.at_once
        self._lanes, self._backing, self._room = lanes, backing, room
        self._budget = budget  # bytes that resident pages have not taken
        self._pages: dict[int, Page] = {}
        self._steps = 0
        self._frames: list[Frame] = []  # least recently used first

    # -- pages ---------------------------------------------------------------------------------------------------

    def allocate(self, page: Mapping[str, Tensor], visiting: Mapping[str, Any] | None = None) -> int:
        own, nbytes = laid_out(page)
        resident = nbytes <= self._budget
        visiting = visiting or {}
        guests, _ = laid_out({name: tensor for name, (tensor, _) in visiting.items()}, 0 if resident else nbytes)
        made = Page(
            own,
            nbytes,
            {name: (field, visiting[name][1]) for name, field in guests.items()},
            None if resident else self._backing.allocate(nbytes),
            dict(page) if resident else {},
            arrived=self._lanes.mark(),
            used=self._lanes.mark(),
            left=self._lanes.mark(),
        )
        if made.backing is None:
            self._budget -= nbytes
        else:
            run = made.backing.overwrite()
            for name, field in own.items():
                field.of(run).copy_(page[name])
            made.left.set()
            made.backing.commit(made.left)
        self._fit_frames(made.moved)
        self._allocated += 1
        self._pages[self._allocated] = made
        return self._allocated

    def release(self, number: int) -> None:
        page = self._pages.pop(number)
        self._send_back(page)
        if page.backing is None:
            self._budget += page.nbytes
            keep_for_current_stream(*page.stays.values())
        else:
            page.arrived.wait()  # no copy may use its memory any more: others get it
            page.left.wait()
            page.backing.release()
        if not self._pages:
            self.drop_frames()

    def prefetch(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved or page.state is not PageState.AWAY:
            return
        if page.backing is not None:
            page.backing.prefetch()
        for _, rests in page.visiting.values():
            rests.prefetch()
        # A page on a disk takes no frame before it has been read: other pages would wait for the disk, too.
        if self._backing.at_once and all(rests.at_once for _, rests in page.visiting.values()):
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
        run = self._frame_of(page, "fetch").run
        here = dict(page.own if page.backing is not None else {})
        here |= {name: field for name, (field, _) in page.visiting.items()}
        return {**page.stays, **{name: field.of(run) for name, field in here.items()}}

    def commit(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved:
            return
        run = self._frame_of(page, "commit").run
        # The copy out begins after the update, and the frame is free only after the copy.
        page.used.set()
        lane = self._lanes.to_host
        lane.after(page.used)
        if page.backing is not None:
            lane.copy(page.backing.overwrite(), run[: page.nbytes])
        for field, rests in page.visiting.values():
            lane.copy(rests.overwrite().view(field.dtype), field.of(run))
        lane.set(page.left)
        for backing in page.rests:
            backing.commit(page.left)
        self.copied.to_host += page.moved
        page.leave_frame(page.left)

    def discard(self, number: int) -> None:
        page = self._pages[number]
        if not page.moved:
            return
        self._frame_of(page, "discard")
        page.used.set()
        # The backing's memory is free once the page has come in; the frame, once its readers on the device are done.
        for backing in page.rests:
            backing.discard(page.arrived)
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

    def residents(self) -> list[Tensor]:
        return [tensor for page in self._pages.values() for tensor in page.stays.values()]

    def footprint(self) -> Mapping[str, int]:
        stay = [page for page in self._pages.values() if page.backing is None]
        resident = sum(page.nbytes for page in stay if all(map(is_there, page.stays.values())))
        away = {"host": self._backing.memory.in_use, "disk": self._backing.disk_bytes}
        return {"device": resident + sum(frame.run.nbytes for frame in self._frames), **away}

    def close(self) -> None:
        for number in list(self._pages):
            self.release(number)
        self._backing.close()

    # -- frames ---------------------------------------------------------------------------------------------------

    def _bring(self, page: Page) -> None:
        """Copy the page into a frame, after the frame's last page has left it, and after its own copy out."""
        # The backing comes first: it raises where the page is lost, and no frame is taken.
        sources: list[Tensor] = []
        try:
            for backing in page.rests:
                sources.append(backing.fetch())
        except BaseException:
            for backing in page.rests[: len(sources)]:
                backing.discard(Mark())
            raise
        # Take the least recently used frame whose page is not HERE.
        frame = next((frame for frame in self._frames if frame.page is None), None)
        # Else that of a page which was prefetched, and is not fetched yet: the page is copied in again later.
        frame = frame or next((frame for frame in self._frames if frame.page.state is PageState.COMING), None)  # type: ignore[union-attr]
        if frame is None:
            raise RuntimeError("more pages are fetched at a time than there are frames")
        if frame.page is not None:
            self._send_back(frame.page)
        self._frames.remove(frame)
        self._frames.append(frame)
        lane = self._lanes.to_device
        lane.after(frame.free)
        # The page's copy out to this same memory may still run: lanes do not wait for each other.
        lane.after(page.left)
        if page.backing is not None:
            lane.copy(frame.run[: page.nbytes], sources.pop(0))
        for (field, _), on_host in zip(page.visiting.values(), sources, strict=True):
            lane.copy(field.of(frame.run), on_host.view(field.dtype))
        lane.set(page.arrived)
        page.frame, page.state, frame.page = frame, PageState.COMING, page
        self.copied.to_device += page.moved

    def _send_back(self, page: Page) -> None:
        """Take the frame from a page that is COMING: nothing uses the page yet, and it is copied in again later."""
        if page.state is PageState.AWAY:
            return
        if page.state is PageState.HERE:
            raise RuntimeError("a page would lose its frame while it is here")
        # The host waits: the lane still reads the backing's memory, which others may get at once.
        page.arrived.wait()
        for backing in page.rests:
            backing.discard(page.arrived)
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
        # Make as many pages resident as fit into what is left of the budget.
        for page in self._pages.values():
            if page.backing is not None and page.nbytes <= self._budget:
                try:
                    run = torch.empty(page.nbytes, dtype=torch.uint8, device=self.works_on)
                except torch.OutOfMemoryError:  # taken by others, or fragmented: the page goes on moving
                    break
                page.left.wait()
                run.copy_(page.backing.fetch())
                page.backing.release()
                self._budget -= page.nbytes
                page.backing, page.stays = None, {name: field.of(run) for name, field in page.own.items()}
                # From now on the visiting tensors have a frame to themselves.
                page.visiting = {
                    name: (replace(field, offset=field.offset - page.nbytes), rests)
                    for name, (field, rests) in page.visiting.items()
                }
        # The largest page that still moves may be smaller than before, and frames with it.
        self.drop_frames()
        self.make_frames()
        self._backing.memory.trim()

    def make_frames(self) -> None:
        self._fit_frames(max((page.moved for page in self._pages.values()), default=0))


def make_store(
    offload: Offload, device: torch.device, rank: int, *, params_off_device: bool, threads: int
) -> StateStore:
    """Make the store that ``state_offload`` chooses.

    Args:
        params_off_device: whether shards of parameters rest off the device, and visit it for each update.
        threads: so many an update on the host uses.

    Raises OffloadError where there is no such folder, or no room in it.
    """
    if offload.tier is Tier.DEVICE and not params_off_device:
        return DeviceStore(device)
    memory, lanes = HostMemory(pinned=device.type == "cuda", device=device), Lanes(device)
    if offload.tier is Tier.CPU:
        return HostStore(memory, lanes, threads)
    if offload.folder is not None:
        return PagedStore(device, lanes, DiskBacking(offload.folder, rank, memory), 0)

    def room() -> int:
        """Count the free bytes. Two steps are over, so torch's allocator already has what activations need."""
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - int(_RESERVE * total))

    if offload.tier is Tier.PAGED and offload.device_budget is not None:
        return PagedStore(device, lanes, HostBacking(memory), offload.device_budget)
    if offload.tier is Tier.PAGED and device.type == "cuda":
        return PagedStore(device, lanes, HostBacking(memory), 0, room)
    # State is on the device, and parameters alone visit it; or the host's memory is the device's.
    return PagedStore(device, lanes, HostBacking(memory), math.inf)
