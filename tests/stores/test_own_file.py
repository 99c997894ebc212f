"""Whose file is whose: names, locks, what crashes leave behind, and forked processes."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from zero_optim import OffloadError
from zero_optim.stores import own_file
from zero_optim.stores.own_file import Owner, create_file, remove_leftovers
from zero_optim.stores.page_file import PageFile


@pytest.fixture(autouse=True)
def _no_job(monkeypatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


def abandon(folder: Path, content: bytes = b"123", **changed: object) -> Path:
    """A file as a crashed process leaves it; ``changed``: of its owner."""
    own = Owner.current()
    owner = Owner(**{"uid": own.uid, "host": own.host, "job": own.job, **changed})
    path = folder / owner.new_name(3)
    path.write_bytes(content)
    return path


def quietly_removed(folder: Path) -> int:
    """Without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return remove_leftovers(folder)


def test_the_name_says_whose_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a-b/c d")
    path, file = create_file(tmp_path, 12)
    assert re.fullmatch(
        rf"zero-optim-{os.getuid()}-[\w.]+-a_b_c_d-rank12-{os.getpid()}-[0-9a-f]{{16}}.pages", path.name
    )
    assert Owner.of(path.name) == Owner.current()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    os.close(file)


def test_the_job_is_that_of_torchrun_or_slurm_or_none(monkeypatch):
    assert Owner.current().job == "local"
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    assert Owner.current().job == "71"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x" * 300)
    assert Owner.current().job == "x" * 64


def test_a_missing_directory(tmp_path):
    folder = tmp_path / "typo"
    with pytest.raises(OffloadError, match=f"state_offload='nvme:{folder}': there is no such directory"):
        PageFile(folder, rank=0)
    assert not folder.exists()
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="no such directory"):
        PageFile(tmp_path / "file", rank=0)


@pytest.fixture
def nobody() -> Iterator[None]:
    """Root may write anywhere, and is somebody else for this test."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    yield
    if root:
        os.seteuid(0)


@pytest.mark.parametrize("mode", [0o555, 0o000])
def test_a_directory_that_cannot_be_written(mode, nobody):
    """The temporary directories of pytest are closed to other users: this one is not."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(mode)
    with pytest.raises(OffloadError, match=f"state_offload='nvme:{folder}': .*Permission denied"):
        PageFile(folder, rank=0)
    folder.rmdir()


def test_no_file_can_be_made(tmp_path, monkeypatch):
    def refuse(*arguments: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(OffloadError, match=f"state_offload='nvme:{tmp_path}': no file can be made there: Read-only"):
        create_file(tmp_path, 0)


# -- leftovers ---------------------------------------------------------------------------------------------------------


def test_what_a_crash_left_is_removed_and_counted(tmp_path):
    left = [abandon(tmp_path, b"x" * 1000), abandon(tmp_path, b"x" * 500)]
    with pytest.warns(UserWarning, match="removed 2 files, 1,500 bytes, that a crash of this job had left"):
        file = PageFile(tmp_path, rank=0)
    assert file.removed_stale == 2
    assert not any(path.exists() for path in left)
    file.close()


def test_files_of_other_jobs_stay_and_are_named(tmp_path):
    left = abandon(tmp_path, job="4711")
    with pytest.warns(UserWarning, match=f"1 files of your other jobs .* {left.name}"):
        assert remove_leftovers(tmp_path) == 0
    assert left.read_bytes() == b"123"


def test_what_is_not_ours_stays(tmp_path):
    """Other hosts and users, other names, links, folders and pipes."""
    precious = tmp_path / "precious"
    precious.write_text("data")
    abandon(tmp_path, host="elsewhere")
    abandon(tmp_path, uid=os.getuid() + 1)
    name = Owner.current().new_name
    (tmp_path / (name(0) + ".txt")).touch()
    (tmp_path / ("x" + name(0))).touch()
    (tmp_path / name(0)).symlink_to(precious)
    (tmp_path / name(0)).mkdir()
    os.mkfifo(tmp_path / name(0))
    before = sorted(tmp_path.iterdir())
    assert quietly_removed(tmp_path) == 0
    assert sorted(tmp_path.iterdir()) == before
    assert precious.read_text() == "data"


def test_a_file_of_another_user_stays_whatever_its_name_says(tmp_path):
    if os.getuid() != 0:
        pytest.skip("only root may give a file away")
    left = abandon(tmp_path)
    os.chown(left, 12345, 12345)
    assert quietly_removed(tmp_path) == 0
    assert left.exists()


def test_where_there_are_no_locks_nothing_is_removed(tmp_path, monkeypatch):
    def flock(*arguments: object) -> None:
        raise OSError(errno.ENOSYS, "no locks")

    left = abandon(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    file = PageFile(tmp_path, rank=0)
    assert file.removed_stale == 0
    assert left.exists()
    file.close()


def test_jobs_and_ranks_share_a_folder(tmp_path, monkeypatch):
    """Whoever starts later leaves the files of those who live alone."""
    files = []
    for job in ("7", "8"):
        monkeypatch.setenv("SLURM_JOB_ID", job)
        for rank in (0, 1, 0):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                files.append(PageFile(tmp_path, rank=rank))
    assert sorted(tmp_path.iterdir()) == sorted({file.path for file in files})
    assert len(files) == 6
    files[0].close()
    assert all(file.path.exists() for file in files[1:])
    for file in files:
        file.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("instant", ["while another looks", "after another removed it"])
def test_a_new_file_that_is_taken_for_a_leftover_is_made_anew(tmp_path, monkeypatch, instant):
    """Between its making and its lock, a file looks abandoned."""
    real, seen = fcntl.flock, []

    def flock(file: int, operation: int) -> None:
        seen.append(file)
        if len(seen) == 1 and instant == "while another looks":
            raise BlockingIOError(errno.EWOULDBLOCK, "held by another")
        if len(seen) == 1:
            os.unlink(next(tmp_path.iterdir()))
        real(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    path, file = create_file(tmp_path, 0)
    assert len(seen) == 2
    assert os.fstat(file).st_ino == path.stat().st_ino
    os.close(file)


def test_no_start_takes_the_file_of_another(tmp_path):
    """Four start and look for leftovers over and over: whoever has a file keeps it."""
    lost = []

    def start_often() -> None:
        for _ in range(100):
            path, file = create_file(tmp_path, 0)
            remove_leftovers(tmp_path)
            if not path.exists() or path.stat().st_ino != os.fstat(file).st_ino:
                lost.append(path)
            path.unlink(missing_ok=True)
            os.close(file)

    threads = [threading.Thread(target=start_often) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not lost


# -- other processes ---------------------------------------------------------------------------------------------------

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
assert buffer.eq(7).all() and file.path.stat().st_size == 4096
print("still there", flush=True)
"""


def test_a_killed_process_leaves_a_file_that_the_next_start_removes(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            file = PageFile(tmp_path, rank=1)
            file.allocate(12345)
            os.write(write, bytes(file.path))
            signal.pause()
        finally:
            os._exit(1)
    os.close(write)
    path = Path(os.fsdecode(os.read(read, 4096)))
    os.close(read)
    try:
        assert quietly_removed(tmp_path) == 0, "its owner lives"
        assert path.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert path.stat().st_size == 16384
    with pytest.warns(UserWarning, match="removed 1 files, 16,384 bytes"):
        file = PageFile(tmp_path, rank=0)
    assert file.removed_stale == 1
    assert list(tmp_path.iterdir()) == [file.path]
    file.close()


def test_forked_processes_end_and_the_file_stays(tmp_path):
    """Until its owner ends, which had no time to close it."""
    run = subprocess.run([sys.executable, "-c", FORKS, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    *refusals, outcome = run.stdout.splitlines()
    assert len(refusals) == 2
    assert all("of which this one is a fork" in refusal for refusal in refusals)
    assert outcome == "still there"
    assert not list(tmp_path.iterdir())


def test_names_are_never_too_long(monkeypatch):
    monkeypatch.setattr(own_file.socket, "gethostname", lambda: "h" * 255)
    monkeypatch.setenv("SLURM_JOB_ID", "j" * 500)
    assert len(Owner.current().new_name(16384)) < 255
