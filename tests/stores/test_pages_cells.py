"""Every cell of the tables in ``stores.paged_store`` and ``stores.disk_pages``: what each event makes of a page."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import pytest
import torch
from tables import table
from zero_optim.stores import disk_pages
from zero_optim.stores.disk_pages import DiskBacking, DiskPage, PagePlace
from zero_optim.stores.host_memory import HostMemory, Lanes, Mark
from zero_optim.stores.paged_store import HostBacking, PagedStore, PageState

IN_FRAMES = table(PageState.__doc__, "event")
ON_DISK = table(PagePlace.__doc__, "event")
SECONDS = 10.0


def test_the_tables_have_every_state():
    assert {state for _, state in IN_FRAMES} == {state.name for state in PageState}
    assert {state for _, state in ON_DISK} == {state.name for state in PagePlace}


# ---- in a store ------------------------------------------------------------------------------------------------------


def _store_with_a_page(state: str) -> tuple[PagedStore, int]:
    device = torch.device("cpu")
    store = PagedStore(device, Lanes(device), HostBacking(HostMemory(pinned=False)), 0)
    number = store.allocate({"state": torch.arange(300.0)})
    if state == "COMING":
        store.prefetch(number)
    if state == "HERE":
        store.fetch(number)["state"].add_(1)
    assert store._pages[number].state is PageState[state]
    return store, number


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in IN_FRAMES.items()])
def test_a_page_of_a_store(event: str, before: str, after: str):
    store, number = _store_with_a_page(before)
    page = store._pages[number]
    call = (lambda: store._send_back(page)) if event == "send_back" else (lambda: getattr(store, event)(number))
    if after == "error":
        with pytest.raises(RuntimeError):
            call()
        assert store._pages[number].state is PageState[before]
        return
    call()
    assert store._pages[number].state is PageState[after]
    if after == "AWAY":
        assert torch.equal(store.fetch(number)["state"], torch.arange(300.0) + (event == "commit"))


# ---- in a file -------------------------------------------------------------------------------------------------------


class _Later(Mark):
    """Passes when it is let."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> None:
        assert self.event.wait(SECONDS)


VALUES = torch.arange(5000, dtype=torch.int64).view(torch.uint8)


@pytest.fixture
def backing(tmp_path: Path) -> Iterator[DiskBacking]:
    made = DiskBacking(tmp_path, 0, HostMemory(pinned=False))
    yield made
    made.close()


def _written(backing: DiskBacking) -> DiskPage:
    page = backing.allocate(VALUES.nbytes)
    page.overwrite().copy_(VALUES)
    page.commit(Mark())
    page.end_write()
    return page


def _page_that_is(backing: DiskBacking, place: str) -> tuple[DiskPage, _Later]:
    """Of a page that is WRITING the write goes on as the mark passes."""
    page, mark = _written(backing), _Later()
    if place == "READING":
        page.prefetch()
    elif place != "ON_DISK":
        page.fetch()
    if place == "WRITING":
        page.commit(mark)
    assert page.place is PagePlace[place]
    return page, mark


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in ON_DISK.items()])
def test_a_page_on_a_disk(backing: DiskBacking, event: str, before: str, after: str):
    page, mark = _page_that_is(backing, before)
    if event != "prefetch":  # it waits for nothing
        mark.event.set()
    arguments = (Mark(),) if event in ("commit", "discard") else ()
    if after == "error":
        with pytest.raises(RuntimeError, match=f"{event} of a page that is {before}"):
            getattr(page, event)(*arguments)
        assert page.place is PagePlace[before]
    else:
        run = getattr(page, event)(*arguments)
        assert page.place is PagePlace[after]
        if event == "fetch" or (event, before) == ("overwrite", "HELD"):
            assert torch.equal(run, VALUES)
    mark.event.set()
    if (event, before) != ("overwrite", "ON_DISK"):
        assert torch.equal(page.fetch(), VALUES)


def test_a_write_that_is_over_makes_place_for_reads(backing: DiskBacking):
    """``prefetch`` of the page that was written begins its read, too."""
    page, mark = _page_that_is(backing, "WRITING")
    mark.event.set()
    futures.wait(page.blocks, SECONDS)
    page.prefetch()
    assert page.place is PagePlace.READING


def test_a_page_whose_buffer_is_taken_is_read_again(backing: DiskBacking):
    *begun, first = (_written(backing) for _ in range(disk_pages.HOST_BUFFERS + 1))
    for page in begun:
        page.prefetch()
    first.overwrite()
    assert begun[-1].place is PagePlace.ON_DISK
    first.commit(Mark())
    for page in begun:
        assert torch.equal(page.fetch(), VALUES)
        page.discard(Mark())


def test_a_page_that_found_no_buffer_is_read_once_there_is_one(backing: DiskBacking):
    made = [_written(backing) for _ in range(disk_pages.HOST_BUFFERS + 2)]
    for page in made:
        page.prefetch()
    *begun, first, second = made
    assert {page.place for page in begun} == {PagePlace.READING}
    assert first.place is second.place is PagePlace.ON_DISK
    begun[0].fetch()
    begun[0].discard(Mark())
    begun[1].fetch()  # whoever uses the disk next begins it
    assert (first.place, second.place) == (PagePlace.READING, PagePlace.ON_DISK)
    second.overwrite()  # it is written anew: nobody wants what is on the disk
    begun[2].fetch()
    begun[2].discard(Mark())
    begun[3].fetch()
    assert second.place is PagePlace.HELD


def test_buffers_follow_a_larger_page(backing: DiskBacking):
    """Those in which a page is read or written are given back once that is over."""
    reading, writing = (_page_that_is(backing, place) for place in ("READING", "WRITING"))
    writing[1].event.set()
    larger = backing.allocate(3 * VALUES.nbytes)
    assert backing.memory.in_use == disk_pages.HOST_BUFFERS * larger.space
    assert {page.place for page in (reading[0], writing[0], larger)} == {PagePlace.ON_DISK}
    for page, _ in (reading, writing):
        assert torch.equal(page.fetch(), VALUES)


def test_two_pages_are_here_at_a_time_and_a_third_takes_the_place_of_either():
    device = torch.device("cpu")
    for first_to_go in (0, 1):
        store = PagedStore(device, Lanes(device), HostBacking(HostMemory(pinned=False)), 0)
        pages = [store.allocate({"state": torch.full((300,), float(value))}) for value in range(3)]
        here = [store.fetch(number)["state"] for number in pages[:2]]
        with pytest.raises(RuntimeError, match="frames"):
            store.fetch(pages[2])
        here[first_to_go].add_(10)
        store.commit(pages[first_to_go])
        assert torch.equal(store.fetch(pages[2])["state"], torch.full((300,), 2.0))
        stays = 1 - first_to_go
        assert torch.equal(here[stays], torch.full((300,), float(stays)))
        store.discard(pages[2])
        assert torch.equal(store.fetch(pages[first_to_go])["state"], torch.full((300,), 10.0 + first_to_go))
