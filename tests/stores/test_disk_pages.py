"""Pages in a file: values, space, transfers, the faults of a disk, and that nothing is left of the file."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest
import torch
from guards import open_files_in
from hypothesis import given, settings
from hypothesis import strategies as st
from zero_optim import ClosedError, OffloadError
from zero_optim.stores import disk_pages
from zero_optim.stores.disk_pages import DiskBacking, DiskPage, PagePlace
from zero_optim.stores.host_memory import ALIGNMENT, HostMemory, Mark

SECONDS = 60.0


class _Later(Mark):
    """A mark that passes when the test lets it. ``then``: called first, in the thread that waits."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.event, self._then = threading.Event(), then

    def wait(self) -> None:
        assert self.event.wait(SECONDS)
        self._then()


def _backing(folder: Path, rank: int = 0) -> DiskBacking:
    return DiskBacking(folder, rank, HostMemory(pinned=False))


@pytest.fixture
def backing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskBacking]:
    """Blocks are small, so that small pages have several, and two threads work each way."""
    monkeypatch.setattr(disk_pages, "BLOCK_BYTES", 2 * ALIGNMENT)
    monkeypatch.setattr(disk_pages, "THREADS", 2)
    made = _backing(tmp_path)
    yield made
    made.close()


def _random(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def _put(page: DiskPage, values: torch.Tensor, mark: Mark | None = None) -> None:
    page.overwrite().copy_(values)
    page.commit(mark or Mark())


def _written(backing: DiskBacking, nbytes: int, seed: int = 0) -> tuple[DiskPage, torch.Tensor]:
    page, values = backing.allocate(nbytes), _random(nbytes, seed)
    _put(page, values)
    page.end_write()
    return page, values


def _get(page: DiskPage) -> torch.Tensor:
    values = page.fetch().clone()
    page.discard(Mark())
    return values


def _path_of(backing: DiskBacking) -> Path:
    """The file has no name: this is how its own process may open it once more."""
    return Path(f"/proc/self/fd/{backing.file.file}")


def _failing(number: int) -> Callable[..., int]:
    """In place of a function of the system: it fails."""

    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


# -- values ------------------------------------------------------------------------------------------------------------


EVENTS = ("allocate", "release", "prefetch", "read", "update", "replace", "end writes")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9 * ALIGNMENT), st.integers(0, 99)), max_size=60))
def test_random_programs(program: list[tuple[str, int, int]]) -> None:
    """Pages come, change and go, with reads and writes in flight: what is read is what a model in memory has. Each page
    takes the first run between others that holds it, and the file has no more than these runs need."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_pages, "BLOCK_BYTES", 2 * ALIGNMENT)
        backing, model, longest = _backing(Path(folder)), {}, 0
        for turn, (event, nbytes, which) in enumerate(program):
            page = [*model][which % len(model)] if model else None
            if event == "allocate" or page is None:
                page, values = backing.allocate(nbytes), _random(nbytes, turn)
                starts = [0, *(other.offset + other.space for other in model)]
                fits = [
                    at for at in starts if all(at >= o.offset + o.space or at + page.space <= o.offset for o in model)
                ]
                assert page.offset == min(fits)
                longest = max(longest, page.offset + page.space)
                assert backing.disk_bytes == _path_of(backing).stat().st_size == longest
                _put(page, values)
                model[page] = values
            elif event == "release":
                page.release()
                del model[page]
            elif event == "prefetch":
                page.prefetch()
            elif event == "read":
                assert torch.equal(_get(page), model[page])
            elif event == "update":
                assert torch.equal(page.fetch().add_(1), model[page].add_(1))
                page.commit(Mark())
            elif event == "replace":
                if page.place in (PagePlace.ON_DISK, PagePlace.HELD):
                    model[page] = _random(page.nbytes, turn)
                    _put(page, model[page])
            else:
                while backing.writing:
                    backing.writing[0].end_write()
                assert not any(page.place is PagePlace.WRITING for page in model)
        assert all(torch.equal(_get(page), values) for page, values in model.items())
        backing.close()
        assert not list(Path(folder).iterdir())


# -- ways into the file ------------------------------------------------------------------------------------------------


def _refuse_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.fcntl

    def fcntl_(file: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_)


def _refuse_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def pwritev(file: int, buffers: list[Any], offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize("refuse", [_refuse_when_asked, _refuse_when_used])
def test_without_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Any) -> None:
    """The file goes through the cache, which drops each block."""
    refuse(monkeypatch)
    dropped: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *arguments: dropped.append(arguments))
    backing = _backing(tmp_path)
    assert not backing.file.direct
    page, values = _written(backing, 10_000)
    assert torch.equal(_get(page), values)
    assert dropped == [(0, 3 * ALIGNMENT, os.POSIX_FADV_DONTNEED)] * 2
    backing.close()


def test_with_o_direct(tmp_path: Path) -> None:
    """Where a plain open takes the flag, so does the file."""
    try:
        os.close(os.open(tmp_path / "plain", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary directory has no O_DIRECT")
    backing = _backing(tmp_path)
    assert backing.file.direct
    assert fcntl.fcntl(backing.file.file, fcntl.F_GETFL) & os.O_DIRECT
    backing.close()


def test_a_file_system_that_cannot_reserve_is_written_to(backing: DiskBacking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", _failing(errno.EOPNOTSUPP))
    backing.allocate(2**20 + ALIGNMENT)
    about = _path_of(backing).stat()
    assert about.st_size == 2**20 + ALIGNMENT
    assert about.st_blocks * 512 >= about.st_size


# -- transfers in the background ---------------------------------------------------------------------------------------


def test_blocks_in_flight_are_bounded(backing: DiskBacking, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads, sixteen blocks: two are in flight at a time, and the others have not begun."""
    write, lock, both = os.pwritev, threading.Lock(), threading.Barrier(2)
    flying, most = 0, 0

    def pwritev(file: int, memory: list[Any], offset: int) -> int:
        nonlocal flying, most
        with lock:
            flying += 1
            most = max(most, flying)
        both.wait(SECONDS)
        with lock:
            flying -= 1
        both.wait(SECONDS)
        return write(file, memory, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)
    _written(backing, 32 * ALIGNMENT)
    assert most == 2


def test_a_write_begins_after_its_mark_and_reads_do_not_wait_for_it(backing: DiskBacking) -> None:
    """Two pages are in flight. The buffer of the write is filled only as its mark passes, and not lent before."""
    others = [_written(backing, 50_000, seed) for seed in range(disk_pages.HOST_BUFFERS)]
    page, values = backing.allocate(50_000), _random(50_000, 7)
    run = page.overwrite()
    mark = _Later(lambda: run.copy_(values))
    page.commit(mark)
    for other, _ in others:
        other.prefetch()
    assert [other.place for other, _ in others] == [PagePlace.READING] * 5 + [PagePlace.ON_DISK], "for lack of a buffer"
    for other, expected in others[:5]:
        assert torch.equal(_get(other), expected)
    assert page.place is PagePlace.WRITING and not page.is_over
    mark.event.set()
    assert torch.equal(_get(page), values)


def test_a_buffer_is_lent_again_once_no_copy_reads_it(backing: DiskBacking) -> None:
    class Copying(Mark):
        def wait(self) -> None:
            free.append(len(backing.free))

    page, _ = _written(backing, 10)
    free: list[int] = []
    page.fetch()
    page.discard(Copying())
    assert [*free, len(backing.free)] == [disk_pages.HOST_BUFFERS - 1, disk_pages.HOST_BUFFERS]


def test_an_error_of_the_device_is_raised_as_it_is(backing: DiskBacking) -> None:
    def fail() -> None:
        raise ZeroDivisionError("the device is gone")

    page, mark = backing.allocate(30_000), _Later(fail)
    mark.event.set()
    _put(page, _random(30_000, 0), mark)
    with pytest.raises(ZeroDivisionError, match="device is gone"):
        page.fetch()


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("reserves", [True, False])
def test_a_full_disk_is_found_by_allocate(
    backing: DiskBacking, monkeypatch: pytest.MonkeyPatch, number: int, reserves: bool
) -> None:
    """What could not be taken whole is given back, and pages that are there stay."""
    page, values = _written(backing, 3 * ALIGNMENT)
    write, some = os.pwritev, iter(range(1))

    def pwritev(file: int, memory: list[Any], offset: int) -> int:
        return write(file, memory, offset) if next(some, None) is not None else _failing(number)()

    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", _failing(number if reserves else errno.EOPNOTSUPP))
        full.setattr(os, "pwritev", pwritev)
        with pytest.raises(OffloadError) as caught:
            backing.allocate(2**21)
    for words in (backing.file.name, "12,288 bytes and needs 2,097,152 more", os.strerror(number), " bytes free"):
        assert words in str(caught.value)
    assert backing.disk_bytes == _path_of(backing).stat().st_size == 3 * ALIGNMENT
    assert torch.equal(_get(page), values)
    page, values = _written(backing, 100_000)
    assert torch.equal(_get(page), values)


def _flip(backing: DiskBacking, place: int) -> None:
    with open(_path_of(backing), "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


FAULTS = {
    "write error": "writing 8,192 bytes at 4,096 failed: Input/output error",
    "disk full": "writing 8,192 bytes at 4,096 failed: No space left on device",
    "short write": "writing 8,192 bytes at 4,096 ended after 4,096",
    "read error": "reading 8,192 bytes at 4,096 failed: Input/output error",
    "short read": "reading 8,192 bytes at 4,096 ended after 4,096",
    "cut off": "reading 4,096 bytes at 12,288 ended after 0",
    "first bit": "corrupted: 8,192 bytes at 4,096 have",
    "last bit": "corrupted: 4,096 bytes at 12,288 have",
}


@pytest.mark.parametrize(("fault", "words"), FAULTS.items(), ids=FAULTS)
def test_a_fault_loses_the_state(backing: DiskBacking, monkeypatch: pytest.MonkeyPatch, fault: str, words: str) -> None:
    """The page raises as it is fetched, and so does every other from then on."""
    other, _ = _written(backing, ALIGNMENT)
    page, _ = _written(backing, 3 * ALIGNMENT)
    with monkeypatch.context() as system:
        call = "pwritev" if "write" in fault or "full" in fault else "preadv"
        if "error" in fault or "full" in fault:
            system.setattr(os, call, _failing(errno.ENOSPC if "full" in fault else errno.EIO))
        elif "short" in fault:
            system.setattr(os, call, lambda file, memory, offset: ALIGNMENT)
        elif fault == "cut off":
            os.truncate(_path_of(backing), 3 * ALIGNMENT)
        else:
            _flip(backing, ALIGNMENT if fault == "first bit" else 4 * ALIGNMENT - 1)
        if call == "pwritev":
            _put(page, _random(3 * ALIGNMENT, 1))
        with pytest.raises(OffloadError) as caught:
            page.fetch()
    assert f"{backing.file.name}" in str(caught.value)
    assert words in str(caught.value)
    assert "state is lost: make a new optimizer and load a checkpoint" in str(caught.value)
    for use in (page.fetch, other.fetch, other.prefetch, other.overwrite, lambda: backing.allocate(1)):
        with pytest.raises(OffloadError) as again:
            use()
        assert str(again.value) == str(caught.value)
    other.release()


def test_a_write_that_failed_is_found_by_the_page_that_needs_its_buffer(
    backing: DiskBacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [_written(backing, ALIGNMENT)[0] for _ in range(disk_pages.HOST_BUFFERS + 1)]
    monkeypatch.setattr(os, "pwritev", _failing(errno.EIO))
    with pytest.raises(OffloadError, match=r"writing 4,096 bytes at 0 failed"):
        for page in pages:
            page.fetch()
            page.commit(Mark())


@pytest.mark.parametrize("verb", ["reading", "writing"])
def test_a_disk_that_hangs_is_waited_for_once(backing: DiskBacking, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """The time-out is 0 here, and the disk goes on when the test lets it. Its buffer is never lent again."""
    other, _ = _written(backing, 20_000)
    page, _ = _written(backing, 20_000)
    goes_on, waits, wait = threading.Event(), [], futures.wait
    call = {"reading": "preadv", "writing": "pwritev"}[verb]
    real = getattr(os, call)

    def hang(*arguments: Any) -> int:
        assert goes_on.wait(SECONDS)
        return real(*arguments)

    def noted(blocks: Any, seconds: float) -> Any:
        waits.append(seconds)
        return wait(blocks, 0)

    with monkeypatch.context() as system:
        system.setattr(os, call, hang)
        system.setattr(futures, "wait", noted)
        if verb == "writing":
            _put(page, _random(20_000, 1))
        words = f"{backing.file.name}: {verb} 20,000 bytes at 20,480 is not over after 120 s: 3 of 3 blocks"
        with pytest.raises(OffloadError, match=words):
            page.fetch()
        assert waits == [120.0]
        with pytest.raises(OffloadError, match=words):
            other.fetch()
        page.release()
        other.release()
        assert waits == [120.0] and len(backing.free) == disk_pages.HOST_BUFFERS - 1
        number = backing.file.file
        with pytest.warns(UserWarning, match="page file of rank 0 in .*: the disk hangs"):
            backing.close()
        assert waits == [120.0, 0.0]
        os.fstat(number)  # threads still use it
        goes_on.set()
        wait(page.blocks, SECONDS)
    os.close(number)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_removes_the_file(tmp_path: Path) -> None:
    backing = _backing(tmp_path)
    page, _ = _written(backing, 10)
    backing.close()
    backing.close()
    assert not list(tmp_path.iterdir()) and not open_files_in(tmp_path)
    for use in (lambda: backing.allocate(1), page.fetch, page.prefetch, page.overwrite):
        with pytest.raises(ClosedError, match="was closed"):
            use()


def test_close_waits_for_transfers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write goes on only once ``close`` waits for it, and is over when the file goes."""
    backing, mark, wait, truncate = _backing(tmp_path), _Later(), futures.wait, os.ftruncate
    page = backing.allocate(10)
    over = []

    def waiting(*arguments: Any) -> Any:
        mark.event.set()
        return wait(*arguments)

    def ftruncate(*arguments: int) -> None:
        over.append(page.is_over)
        truncate(*arguments)

    monkeypatch.setattr(futures, "wait", waiting)
    monkeypatch.setattr(os, "ftruncate", ftruncate)
    _put(page, _random(10, 0), mark)
    backing.close()
    assert over == [True]


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_space_is_free_though_a_fork_has_the_file_open(tmp_path: Path, how: str) -> None:
    backing = _backing(tmp_path)
    page, _ = _written(backing, 10)
    number, forks = backing.file.file, os.dup(backing.file.file)
    assert os.fstat(forks).st_size == ALIGNMENT
    backing.close() if how == "closed" else None
    backing.pages.clear()  # a page and its store refer to each other
    del page, backing
    assert os.fstat(forks).st_size == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    os.close(forks)


def test_a_failed_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pwritev", _failing(errno.EROFS))
    words = f"state_offload='nvme:{tmp_path}': it cannot be written: Read-only"
    with pytest.raises(OffloadError, match=words) as caught:
        _backing(tmp_path)
    assert not open_files_in(tmp_path), "while the error, and all that it refers to, is still there"
    del caught


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    folder = tmp_path / "typo"
    with pytest.raises(OffloadError, match=f"state_offload='nvme:{folder}': there is no such directory"):
        _backing(folder)
    assert not folder.exists()
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="that is no directory"):
        _backing(tmp_path / "file")
    with pytest.raises(OffloadError, match="state_offload='nvme:/proc': no file can be made there"):
        _backing(Path("/proc"))


def _without_o_tmpfile(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network file system: a file has to be made with a name, and loses it at once."""
    real = os.open

    def refuse(path: Any, flags: int, *arguments: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("refuse", [lambda monkeypatch: None, _without_o_tmpfile])
def test_files_of_one_folder_do_not_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Any) -> None:
    """What is in the folder stays, and nothing is added to it."""
    refuse(monkeypatch)
    (tmp_path / "precious").write_text("data")
    backings = [_backing(tmp_path, rank) for rank in (0, 1, 0)]
    pages = [_written(backing, 50_000, seed) for seed, backing in enumerate(backings)]
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    for backing, (page, values) in zip(backings, pages, strict=True):
        about = os.fstat(backing.file.file)
        assert (about.st_nlink, stat.S_IMODE(about.st_mode)) == (0, 0o600), "the system removes it, whatever comes"
        assert torch.equal(_get(page), values)
        backing.close()
    assert (tmp_path / "precious").read_text() == "data"


FORKS = """
import os, sys
from pathlib import Path
from zero_optim import ClosedError
from zero_optim.stores.disk_pages import DiskBacking
from zero_optim.stores.host_memory import HostMemory
from zero_optim.stores.host_memory import Mark
backing = DiskBacking(Path(sys.argv[1]), 0, HostMemory(pinned=False))
page = backing.allocate(9)
page.overwrite().fill_(7)
page.commit(Mark())
page.end_write()
for end in ("exit", "drop"):
    child = os.fork()
    if child == 0:
        try:
            page.fetch()
        except ClosedError as error:
            print(error, flush=True)
        backing.close()
        if end == "drop":
            del page, backing
        sys.exit(7)  # runs what is to run at a process's end
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert page.fetch().eq(7).all() and os.fstat(backing.file.file).st_size == 4096
print("still there", flush=True)
"""


@pytest.mark.slow
def test_forked_processes_end_and_the_file_stays(tmp_path: Path) -> None:
    """Until its owner ends, which had no time to close it."""
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    *refusals, outcome = run.stdout.splitlines()
    assert len(refusals) == 2
    assert all("of which this one is a fork" in refusal for refusal in refusals)
    assert outcome == "still there"
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    """The file has no name, so its space is free once no process has it open."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            backing = _backing(tmp_path, 1)
            backing.allocate(12345)
            os.write(write, str(backing.file.file).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    number = os.read(read, 4096).decode()
    os.close(read)
    assert not list(tmp_path.iterdir())
    about = os.stat(f"/proc/{child}/fd/{number}")
    assert (about.st_size, about.st_nlink) == (16384, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert not list(tmp_path.iterdir())
