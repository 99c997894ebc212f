"""Every cell of the tables in ``stores.paged_store`` and ``stores.disk_homes``: what each event makes of a page."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tables import table
from zero_optim.errors import OffloadError
from zero_optim.stores import disk_homes, paged_store
from zero_optim.stores.disk_homes import DiskHomes, PagePlace
from zero_optim.stores.host_homes import HostHomes
from zero_optim.stores.host_memory import HostMemory
from zero_optim.stores.lanes import Lanes
from zero_optim.stores.page import PageState
from zero_optim.stores.page_file import PageFile
from zero_optim.stores.paged_store import PagedStore

IN_FRAMES = table(paged_store.__doc__, "event")
ON_DISK = table(disk_homes.__doc__, "event")
SECONDS = 10.0


def test_the_tables_have_every_state():
    assert {state for _, state in IN_FRAMES} == {state.name for state in PageState}
    assert {state for _, state in ON_DISK} == {state.name for state in PagePlace}


# ---- in a store ------------------------------------------------------------------------------------------------------


def _store_with_a_page(state: str) -> tuple[PagedStore, int]:
    device = torch.device("cpu")
    store = PagedStore(device, Lanes(), HostHomes(HostMemory(pinned=False)), 0)
    number = store.allocate({"state": torch.arange(300.0)})
    if state == "COMING":
        store.prefetch(number)
    if state == "HERE":
        store.fetch(number)["state"].add_(1)
    assert store.state_of(number) is PageState[state]
    return store, number


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in IN_FRAMES.items()])
def test_a_page_of_a_store(event: str, before: str, after: str):
    store, number = _store_with_a_page(before)
    page = store._pages[number]
    call = (lambda: store._send_back(page)) if event == "send_back" else (lambda: getattr(store, event)(number))
    if after == "error":
        with pytest.raises(RuntimeError):
            call()
        assert store.state_of(number) is PageState[before]
        return
    call()
    assert store.state_of(number) is PageState[after]
    if after == "AWAY":
        assert torch.equal(store.fetch(number)["state"], torch.arange(300.0) + (event == "commit"))


# ---- in a file -------------------------------------------------------------------------------------------------------


class _Mark:
    """Passes when it is let."""

    def __init__(self, *, passed: bool) -> None:
        self._passed = threading.Event()
        if passed:
            self.let_pass()

    def let_pass(self) -> None:
        self._passed.set()

    def set(self) -> None: ...
    def order_current(self) -> None: ...

    def wait(self) -> None:
        assert self._passed.wait(SECONDS)


VALUES = torch.arange(5000, dtype=torch.int64).view(torch.uint8)


@pytest.fixture
def homes(tmp_path: Path) -> Iterator[DiskHomes]:
    made = DiskHomes(PageFile(tmp_path, rank=0), HostMemory(pinned=False))
    yield made
    made.close()


def _written(homes: DiskHomes) -> Any:
    home = homes.make(VALUES.nbytes)
    home.outgoing().copy_(VALUES)
    home.filled(_Mark(passed=True))
    home.transfer.wait(SECONDS)
    home.end_write()
    return home


def _page_that_is(homes: DiskHomes, place: str) -> tuple[Any, _Mark]:
    home, mark = _written(homes), _Mark(passed=False)
    if place == "READING":
        home.expect()
    elif place == "HELD":
        home.incoming()
    elif place == "WRITING":
        home.incoming()
        home.filled(mark)
    elif place == "KEPT":
        home.incoming()
        failure = OSError(errno.EIO, os.strerror(errno.EIO))
        with mock.patch("os.pwritev", side_effect=failure):
            home.filled(_Mark(passed=True))
            home.end_write()
    elif place == "LOST":
        os.ftruncate(homes.file._file.file, 0)
        with pytest.raises(OffloadError, match="cut off"):
            home.incoming()
    assert home.place is PagePlace[place]
    return home, mark


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in ON_DISK.items()])
def test_a_page_on_a_disk(homes: DiskHomes, event: str, before: str, after: str):
    home, mark = _page_that_is(homes, before)
    if event != "expect":  # it waits for nothing
        mark.let_pass()
    arguments = (_Mark(passed=True),) if event in ("filled", "unchanged") else ()
    if after == "error":
        with pytest.raises(OffloadError if (event, before) == ("incoming", "LOST") else RuntimeError):
            getattr(home, event)(*arguments)
        assert home.place is PagePlace[before]
    else:
        run = getattr(home, event)(*arguments)
        assert home.place is PagePlace[after]
        if event == "incoming" or (event == "outgoing" and before != "ON_DISK"):
            assert torch.equal(run, VALUES)
    mark.let_pass()
    if home.place is not PagePlace.LOST:
        assert torch.equal(home.incoming(), VALUES) or (event, before) == ("outgoing", "ON_DISK")


def test_more_pages_than_buffers_are_written_and_read(homes: DiskHomes):
    """Buffers are lent again as writes end, and taken from pages that are not wanted yet."""
    made = [homes.make(VALUES.nbytes) for _ in range(3 * disk_homes.HOST_BUFFERS)]
    for number, home in enumerate(made):
        home.outgoing().copy_(VALUES + number)
        home.filled(_Mark(passed=True))
    for home in made:
        home.expect()
    for number, home in reversed(list(enumerate(made))):
        assert torch.equal(home.incoming(), VALUES + number)
        home.unchanged(_Mark(passed=True))


def test_a_page_whose_buffer_is_taken_is_read_again(homes: DiskHomes):
    *begun, first = (_written(homes) for _ in range(disk_homes.HOST_BUFFERS + 1))
    for home in begun:
        home.expect()
    first.outgoing()
    assert begun[-1].place is PagePlace.ON_DISK
    first.filled(_Mark(passed=True))
    first.transfer.wait(SECONDS)
    for home in begun[:3]:
        assert torch.equal(home.incoming(), VALUES)
        home.unchanged(_Mark(passed=True))
    assert begun[-1].place is PagePlace.READING


def test_a_page_that_found_no_buffer_is_read_once_there_is_one(homes: DiskHomes):
    made = [_written(homes) for _ in range(disk_homes.HOST_BUFFERS + 2)]
    for home in made:
        home.expect()
    *begun, first, second = made
    assert {home.place for home in begun} == {PagePlace.READING}
    assert first.place is second.place is PagePlace.ON_DISK
    begun[0].incoming()
    begun[0].unchanged(_Mark(passed=True))
    begun[1].incoming()  # whoever uses the disk next begins it
    assert (first.place, second.place) == (PagePlace.READING, PagePlace.ON_DISK)
    second.outgoing()  # it is written anew: nobody wants what is on the disk
    begun[2].incoming()
    begun[2].unchanged(_Mark(passed=True))
    begun[3].incoming()
    assert second.place is PagePlace.HELD


def test_two_pages_are_here_at_a_time_and_a_third_takes_the_place_of_either():
    device = torch.device("cpu")
    for first_to_go in (0, 1):
        store = PagedStore(device, Lanes(), HostHomes(HostMemory(pinned=False)), 0)
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
