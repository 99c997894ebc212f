"""Pages in a file: values, space, transfers, every fault that a disk has in store, and that nothing is left of it."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from guards import open_files_in
from zero_optim import ClosedError, OffloadError
from zero_optim.stores import direct_file, page_file
from zero_optim.stores.direct_file import checksum_function, memory_of
from zero_optim.stores.extents import Extent, aligned
from zero_optim.stores.host_memory import ALIGNMENT, HostMemory
from zero_optim.stores.page_file import PageFile

SECONDS = 60.0


@pytest.fixture
def pages(tmp_path, monkeypatch) -> Iterator[PageFile]:
    """Blocks are small, so that small pages have several."""
    monkeypatch.setattr(page_file, "BLOCK_BYTES", 2 * ALIGNMENT)
    file = PageFile(tmp_path, rank=0, threads=2)
    yield file
    file.close()


def aligned_buffer(nbytes: int) -> torch.Tensor:
    return HostMemory(pinned=False).take(aligned(nbytes))


def random_buffer(nbytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return aligned_buffer(nbytes).random_(0, 256, generator=generator)


def put(file: PageFile, nbytes: int, seed: int = 0) -> tuple[Extent, torch.Tensor]:
    extent, buffer = file.allocate(nbytes), random_buffer(nbytes, seed)
    file.write(extent, buffer).wait(SECONDS)
    return extent, buffer


def get(file: PageFile, extent: Extent) -> torch.Tensor:
    buffer = aligned_buffer(extent.nbytes)
    file.read(extent, buffer).wait(SECONDS)
    return buffer


def path_of(file: PageFile) -> Path:
    """The file has no name: this is how its own process may open it once more."""
    return Path(f"/proc/self/fd/{file._file.file}")


def failing(number: int):
    """In place of a function of the system: it fails."""

    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    return fail


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 37, 4095, 4096, 4097, 8192, 8193, 100_001])
def test_a_page_comes_back(pages, nbytes):
    extent, buffer = put(pages, nbytes)
    assert torch.equal(get(pages, extent), buffer)
    assert pages.nbytes == path_of(pages).stat().st_size == -(-nbytes // ALIGNMENT) * ALIGNMENT


@pytest.mark.parametrize("seed", range(3))
def test_random_programs(pages, seed):
    """Pages come, change and go; after each change all that is there is as it was written."""
    generator = random.Random(seed)
    model: dict[Extent, torch.Tensor] = {}
    for number in range(60):
        action = generator.random()
        if not model or action < 0.5:
            extent, buffer = put(pages, generator.randint(0, 9 * ALIGNMENT), number)
            model[extent] = buffer
        elif action < 0.75:
            pages.release(extent := generator.choice(list(model)))
            del model[extent]
        else:
            extent = generator.choice(list(model))
            model[extent] = random_buffer(extent.nbytes, number)
            pages.write(extent, model[extent]).wait(SECONDS)
        at = {extent: aligned_buffer(extent.nbytes) for extent in model}
        for transfer in [pages.read(extent, at[extent]) for extent in model]:
            transfer.wait(SECONDS)
        assert all(torch.equal(at[extent], model[extent]) for extent in model)
    assert pages.nbytes == path_of(pages).stat().st_size


@pytest.mark.parametrize(
    "buffer",
    [
        aligned_buffer(2 * ALIGNMENT)[512 : 512 + ALIGNMENT],
        aligned_buffer(ALIGNMENT)[:4095],
        aligned_buffer(2 * ALIGNMENT)[::2],
        aligned_buffer(4 * ALIGNMENT).view(torch.float32),
    ],
    ids=["not aligned", "too short", "not contiguous", "not bytes"],
)
def test_other_buffers_are_refused(pages, buffer):
    with pytest.raises(ValueError, match="buffer must be"):
        pages.write(pages.allocate(4096), buffer)


def test_checksums_do_not_need_a_package(monkeypatch):
    digits = torch.tensor(list(b"123456789"), dtype=torch.uint8)
    memory = memory_of(digits)
    assert checksum_function()(memory) == 0xE3069283, "CRC-32C of these digits"
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    assert checksum_function.__wrapped__() is zlib.crc32
    assert zlib.crc32(memory) == 0xCBF43926


# -- ways into the file ------------------------------------------------------------------------------------------------


def refuse_when_asked(monkeypatch) -> None:
    real = fcntl.fcntl

    def fcntl_(file: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", fcntl_)


def refuse_when_used(monkeypatch) -> None:
    real = os.pwritev

    def pwritev(file: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "pwritev", pwritev)


@pytest.mark.parametrize("refuse", [refuse_when_asked, refuse_when_used])
def test_without_o_direct(tmp_path, monkeypatch, refuse):
    """The file goes through the cache, which is told to forget each block."""
    refuse(monkeypatch)
    forgotten = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, *arguments: forgotten.append(arguments))
    file = PageFile(tmp_path, rank=0)
    assert not file.direct
    forgotten.clear()
    extent, buffer = put(file, 10_000)
    assert torch.equal(get(file, extent), buffer)
    assert forgotten == [(0, 3 * ALIGNMENT, os.POSIX_FADV_DONTNEED)] * 2
    file.close()


def test_with_o_direct(tmp_path):
    """Where a plain open takes the flag, so does the file."""
    try:
        os.close(os.open(tmp_path / "plain", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("the file system of the temporary directory has no O_DIRECT")
    file = PageFile(tmp_path, rank=0)
    assert file.direct
    assert fcntl.fcntl(file._file.file, fcntl.F_GETFL) & os.O_DIRECT
    file.close()


@pytest.mark.parametrize("done", [ALIGNMENT, ALIGNMENT + 100])
def test_calls_that_do_a_part(pages, monkeypatch, done):
    """The system may read and write less than it was asked for: the rest follows, from a multiple of ALIGNMENT on."""
    offsets = {"read": [], "write": []}

    def doing_a_part(call, verb: str):
        def part(file: int, memory: list[memoryview], offset: int) -> int:
            offsets[verb].append(offset)
            return min(call(file, memory, offset), done)

        return part

    monkeypatch.setattr(os, "pwritev", doing_a_part(os.pwritev, "write"))
    monkeypatch.setattr(os, "preadv", doing_a_part(os.preadv, "read"))
    extent, buffer = put(pages, 2 * ALIGNMENT)
    assert torch.equal(get(pages, extent), buffer)
    assert offsets == {"read": [0, ALIGNMENT], "write": [0, ALIGNMENT]}


def test_a_file_system_that_cannot_reserve_is_written_to(pages, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    pages.allocate(2**20 + ALIGNMENT)
    about = path_of(pages).stat()
    assert about.st_size == 2**20 + ALIGNMENT
    assert about.st_blocks * 512 >= about.st_size


# -- threads -----------------------------------------------------------------------------------------------------------


def test_blocks_in_flight_are_bounded(pages, monkeypatch):
    """Two threads, sixteen blocks: two are in flight at a time, and the others have not begun."""
    write, lock, both = os.pwritev, threading.Lock(), threading.Barrier(2)
    flying, most = 0, 0

    def pwritev(file: int, memory: list[memoryview], offset: int) -> int:
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
    put(pages, 32 * ALIGNMENT)
    assert most == 2


def test_a_write_begins_after_what_it_waits_for(pages):
    """And reads do not wait behind it."""
    other, expected = put(pages, 50_000)
    extent, buffer = pages.allocate(50_000), aligned_buffer(50_000)
    filled, values = threading.Event(), random_buffer(50_000, 7)

    def after() -> None:
        assert filled.wait(SECONDS)
        buffer.copy_(values)

    transfer = pages.write(extent, buffer, after)
    assert torch.equal(get(pages, other), expected)
    assert not transfer.done
    with pytest.raises(
        OffloadError,
        match=r"writing 50,000 bytes at 53,248 of the page file of rank 0 in .*: 7 of 7 blocks .* after 0 s",
    ):
        transfer.wait(0)
    for misuse in (pages.write, pages.read):
        with pytest.raises(OffloadError, match="still being written or read; this is a bug"):
            misuse(extent, aligned_buffer(50_000))
    with pytest.raises(OffloadError, match="still being"):
        pages.release(extent)
    filled.set()
    transfer.wait(SECONDS)
    assert transfer.done
    assert torch.equal(get(pages, extent), values)


def test_what_a_write_waits_for_may_fail(pages):
    extent, buffer = put(pages, 30_000)

    def after() -> None:
        raise ZeroDivisionError("the device is gone")

    with pytest.raises(ZeroDivisionError, match="device is gone"):
        pages.write(extent, buffer, after).wait(SECONDS)
    with pytest.raises(ZeroDivisionError):
        get(pages, extent)
    pages.write(extent, buffer).wait(SECONDS)
    assert torch.equal(get(pages, extent), buffer)


# -- misuse ------------------------------------------------------------------------------------------------------------


def test_a_page_that_was_never_written(pages):
    with pytest.raises(OffloadError, match="nothing was ever written there; this is a bug"):
        get(pages, pages.allocate(10))


def test_a_page_that_was_released(pages):
    extent, buffer = put(pages, 10)
    pages.release(extent)
    assert put(pages, 10)[0].offset == extent.offset
    for misuse in (lambda: pages.release(extent), lambda: get(pages, extent), lambda: pages.write(extent, buffer)):
        with pytest.raises(OffloadError, match="was released; this is a bug"):
            misuse()


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_found_by_allocate(pages, monkeypatch, number):
    extent, buffer = put(pages, 3 * ALIGNMENT)
    with monkeypatch.context() as full:
        full.setattr(os, "posix_fallocate", failing(number))
        with pytest.raises(OffloadError) as caught:
            pages.allocate(100_000)
    for words in (str(pages.name), "12,288 bytes and needs 102,400 more", os.strerror(number), " bytes free"):
        assert words in str(caught.value)
    assert pages.nbytes == path_of(pages).stat().st_size == 3 * ALIGNMENT
    assert torch.equal(get(pages, extent), buffer)
    put(pages, 100_000)


def test_what_could_not_be_reserved_whole_is_given_back(pages, monkeypatch):
    """The zeros fill the disk: it must not stay full of them."""
    write, written = os.pwritev, []

    def pwritev(file: int, memory: list[memoryview], offset: int) -> int:
        if written:
            raise OSError(errno.ENOSPC, "full")
        written.append(offset)
        return write(file, memory, offset)

    monkeypatch.setattr(os, "posix_fallocate", failing(errno.EOPNOTSUPP))
    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(OffloadError, match="full"):
        pages.allocate(2**21)
    assert path_of(pages).stat().st_size == 0


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_fails(pages, monkeypatch, number):
    extent, buffer = put(pages, 100_000)
    kept = buffer.clone()
    with monkeypatch.context() as fault:
        fault.setattr(os, "pwritev", failing(number))
        transfer = pages.write(extent, buffer)
        with pytest.raises(OffloadError) as caught:
            transfer.wait(SECONDS)
    assert transfer.done
    for words in (f"{pages.name}: 8,192 bytes at 0", os.strerror(number), "file system is at fault", "bytes free"):
        assert words in str(caught.value)
    assert torch.equal(buffer, kept)
    with pytest.raises(OffloadError, match="could not be written"):
        get(pages, extent)
    pages.write(extent, buffer).wait(SECONDS)
    assert torch.equal(get(pages, extent), buffer)


def test_a_file_system_that_takes_nothing(pages, monkeypatch):
    monkeypatch.setattr(os, "pwritev", lambda *arguments: 0)
    with pytest.raises(OffloadError, match="took 0 bytes of 4,096"):
        put(pages, 10)


def test_a_read_fails(pages, monkeypatch):
    extent, _ = put(pages, 10_000)
    monkeypatch.setattr(os, "preadv", failing(errno.EIO))
    with pytest.raises(OffloadError, match=r"8,192 bytes at 0 could not be read: .*; the state that was there is lost"):
        get(pages, extent)


@pytest.mark.parametrize(("length", "found"), [(0, 0), (5_000, 5_000), (8_192, 0), (9_000, 808), (12_000, 3_808)])
def test_a_file_that_is_cut_off(pages, length, found):
    extent, _ = put(pages, 10_000)
    os.truncate(path_of(pages), length)
    nbytes, offset = (8_192, 0) if length < 8_192 else (4_096, 8_192)
    words = f"was cut off: of {nbytes:,} bytes at {offset:,}, {found:,} are there; the state that was there is lost"
    with pytest.raises(OffloadError, match=words) as caught:
        get(pages, extent)
    assert str(pages.name) in str(caught.value)


@pytest.mark.parametrize("place", [0, 4_999, 8_192, 9_999])
def test_a_flipped_bit(pages, place):
    extent, buffer = put(pages, 10_000)
    with open(path_of(pages), "r+b") as file:
        file.seek(place)
        file.write(bytes([int(buffer[place]) ^ 1]))
    with pytest.raises(OffloadError, match="damaged.*; the state that was there is lost") as caught:
        get(pages, extent)
    assert f"{str(pages.name)} is damaged" in str(caught.value)


# -- the end -----------------------------------------------------------------------------------------------------------


def test_close_removes_the_file(tmp_path):
    file = PageFile(tmp_path, rank=0)
    extent, buffer = put(file, 10)
    file.close()
    file.close()
    assert not list(tmp_path.iterdir())
    for use in (
        lambda: file.allocate(1),
        lambda: file.release(extent),
        lambda: file.read(extent, buffer),
        lambda: file.write(extent, buffer),
    ):
        with pytest.raises(ClosedError, match="was closed"):
            use()


def test_close_waits_for_transfers(tmp_path, monkeypatch):
    """The write goes on only once ``close`` waits for it, and is over when the file goes."""
    waited_for, wait, truncate = threading.Event(), page_file.wait_for_all, os.ftruncate
    file = PageFile(tmp_path, rank=0)
    over = []

    def wait_for_all(*arguments: object) -> bool:
        waited_for.set()
        return wait(*arguments)

    def ftruncate(*arguments: int) -> None:
        over.append(transfer.done)
        truncate(*arguments)

    monkeypatch.setattr(page_file, "wait_for_all", wait_for_all)
    monkeypatch.setattr(os, "ftruncate", ftruncate)
    transfer = file.write(file.allocate(10), aligned_buffer(10), lambda: waited_for.wait(SECONDS))
    file.close()
    assert over == [True]
    transfer.wait(0)


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_space_is_free_though_a_fork_has_the_file_open(tmp_path, how):
    file = PageFile(tmp_path, rank=0)
    put(file, 10)
    number, forks = file._file.file, os.dup(file._file.file)
    assert os.fstat(forks).st_size == ALIGNMENT
    file.close() if how == "closed" else None
    del file
    assert os.fstat(forks).st_size == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)
    os.close(forks)


def test_a_failed_start_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(direct_file.os, "pwritev", failing(errno.EROFS))
    with pytest.raises(
        OffloadError, match=f"state_offload='nvme:{tmp_path}': it cannot be written: Read-only"
    ) as caught:
        PageFile(tmp_path, rank=0)
    assert not open_files_in(tmp_path), "while the error, and all that it refers to, is still there"
    del caught


# -- the folder --------------------------------------------------------------------------------------------------------


def test_a_missing_directory(tmp_path):
    folder = tmp_path / "typo"
    with pytest.raises(OffloadError, match=f"state_offload='nvme:{folder}': there is no such directory"):
        PageFile(folder, rank=0)
    assert not folder.exists()
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="that is no directory"):
        PageFile(tmp_path / "file", rank=0)
    with pytest.raises(OffloadError, match="state_offload='nvme:/proc': no file can be made there"):
        PageFile(Path("/proc"), rank=0)


def without_o_tmpfile(monkeypatch) -> None:
    """As a network file system: a file has to be made with a name, and loses it at once."""
    real = os.open

    def refuse(path: object, flags: int, *arguments: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("refuse", [lambda monkeypatch: None, without_o_tmpfile])
def test_files_of_one_folder_do_not_meet(tmp_path, monkeypatch, refuse):
    """What is in the folder stays, and nothing is added to it."""
    refuse(monkeypatch)
    (tmp_path / "precious").write_text("data")
    files = [PageFile(tmp_path, rank=rank) for rank in (0, 1, 0)]
    put_there = [put(file, 50_000, seed) for seed, file in enumerate(files)]
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    for file, (extent, buffer) in zip(files, put_there, strict=True):
        about = os.fstat(file._file.file)
        assert (about.st_nlink, stat.S_IMODE(about.st_mode)) == (0, 0o600), "the system removes it, whatever comes"
        assert torch.equal(get(file, extent), buffer)
        file.close()
    assert (tmp_path / "precious").read_text() == "data"


FORKS = """
import os, sys
from pathlib import Path
from zero_optim import ClosedError
from zero_optim.stores.host_memory import HostMemory
from zero_optim.stores.page_file import PageFile
file = PageFile(Path(sys.argv[1]), rank=0)
extent, buffer = file.allocate(9), HostMemory(pinned=False).take(4096).fill_(7)
file.write(extent, buffer).wait(60)
for end in ("exit", "drop"):
    child = os.fork()
    if child == 0:
        try:
            file.read(extent, buffer)
        except ClosedError as error:
            print(error, flush=True)
        file.close()
        if end == "drop":
            del file
        sys.exit(7)  # runs what is to run at a process's end
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
file.read(extent, buffer.zero_()).wait(60)
assert buffer.eq(7).all() and os.fstat(file._file.file).st_size == 4096
print("still there", flush=True)
"""


@pytest.mark.slow
def test_forked_processes_end_and_the_file_stays(tmp_path):
    """Until its owner ends, which had no time to close it."""
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    *refusals, outcome = run.stdout.splitlines()
    assert len(refusals) == 2
    assert all("of which this one is a fork" in refusal for refusal in refusals)
    assert outcome == "still there"
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_nothing(tmp_path):
    """The file has no name, so its space is free once no process has it open."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            file = PageFile(tmp_path, rank=1)
            file.allocate(12345)
            os.write(write, str(file._file.file).encode())
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
