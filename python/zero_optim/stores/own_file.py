"""The file of one process in a folder that many share: its name, its lock, and what crashed processes left there.

A file is named ``zero-optim-<uid>-<host>-<job>-rank<rank>-<pid>-<random>.pages`` and locked for as long as its process
lives: the system drops the lock however the process ends. A file that bears our name and can be locked has therefore
no owner. Three more conditions have to hold before it is removed:

- the same user: the name says so, and the file system;
- the same host: on a network file system, locks of one machine may not be seen by another;
- the same job: that of torchrun or Slurm, or none. Files of other jobs are none of our business, even if they look
  abandoned; they are named in a warning.

Several ranks that start at once look for leftovers while others have just created their files and not locked them yet.
So a file is good only once it is locked and still there; otherwise its process makes another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..errors import OffloadError

_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")
_NO_JOB = "local"
_NAME = re.compile(r"zero-optim-(\d+)-([\w.]+)-([\w.]+)-rank\d+-\d+-[0-9a-f]{16}\.pages", re.ASCII)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_TRIES = 100


@dataclass(frozen=True)
class Owner:
    """Whose files are whose: of two equal owners, one may remove what the other left behind."""

    uid: int
    host: str
    job: str

    @classmethod
    def current(cls) -> Owner:
        """This process."""
        job = next((os.environ[name] for name in _JOB_VARIABLES if os.environ.get(name)), _NO_JOB)
        return cls(os.getuid(), _word(socket.gethostname()), _word(job))

    @classmethod
    def of(cls, name: str) -> Owner | None:
        """Of the file of this name; None where it is no name of ours."""
        match = _NAME.fullmatch(name)
        return cls(int(match[1]), match[2], match[3]) if match else None

    def new_name(self, rank: int) -> str:
        """For a file that does not exist yet."""
        return f"zero-optim-{self.uid}-{self.host}-{self.job}-rank{rank}-{os.getpid()}-{secrets.token_hex(8)}.pages"


def _word(text: str) -> str:
    """``text`` without the hyphens that part a name, and not longer than a name may be."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", text)[:64] or "_"


def create_file(folder: Path, rank: int) -> tuple[Path, int]:
    """A new, empty, locked file. Returns its path and descriptor.

    Raises OffloadError, naming the folder, where no file can be made in it.
    """
    for _ in range(_TRIES):
        path = folder / Owner.current().new_name(rank)
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise OffloadError(f"state_offload='nvme:{folder}': no file can be made there: {error.strerror}") from error
        if _lock(file) and os.fstat(file).st_nlink:
            return path, file
        os.close(file)  # another process took it for a leftover, and removes it
    raise OffloadError(f"state_offload='nvme:{folder}': {_TRIES} files made there were removed at once by others")


def _lock(file: int) -> bool:
    """Whether nobody else holds it.

    Where the file system has no locks, nobody ever can lock a file to remove it, and it is as safe without.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _NO_LOCKS
    return True


def remove_leftovers(folder: Path) -> int:
    """Remove what crashed processes of this user, host and job left in ``folder``. Returns how many files.

    Warns of them, and of files of this user's other jobs on this host that no process holds: these stay.
    Raises OffloadError, naming the folder, where it is missing or cannot be read.
    """
    own, removed, kept = Owner.current(), [], []
    for path, owner in _files(folder):
        if (owner.uid, owner.host) != (own.uid, own.host):
            continue
        with _abandoned(path) as nbytes:
            if nbytes is not None and owner.job == own.job:
                with contextlib.suppress(OSError):  # another rank was faster, or the folder keeps what is in it
                    os.unlink(path)
                    removed.append(nbytes)
            elif nbytes is not None:
                kept.append(path.name)
    if removed:
        warnings.warn(
            f"{folder}: removed {len(removed)} files, {sum(removed):,} bytes, that a crash of this job had left",
            stacklevel=2,
        )
    if kept:
        warnings.warn(
            f"{folder}: {len(kept)} files of your other jobs on this host, which no process holds, are left as they "
            f"are; remove them if these jobs are over: {', '.join(kept[:5])}",
            stacklevel=2,
        )
    return len(removed)


def _files(folder: Path) -> Iterator[tuple[Path, Owner]]:
    """Those that bear our name, links and folders among them."""
    try:
        paths = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise OffloadError(
            f"state_offload='nvme:{folder}': there is no such directory; make it on a fast local disk, on every machine"
        ) from error
    except OSError as error:
        raise OffloadError(f"state_offload='nvme:{folder}': it cannot be read: {error.strerror}") from error
    for path in paths:
        owner = Owner.of(path.name)
        if owner is not None:
            yield path, owner


@contextmanager
def _abandoned(path: Path) -> Iterator[int | None]:
    """The bytes of a file that no process holds, which is locked in the meantime; None for any other.

    A link is not followed, and a file that is not this user's is left alone, whatever its name says.
    """
    try:
        # What looks like a file may be a pipe: without O_NONBLOCK, opening it would wait for a writer.
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        yield None
        return
    try:
        about = os.fstat(file)
        ours = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()
        yield about.st_size if ours and _is_free(file) and os.fstat(file).st_nlink else None
    finally:
        os.close(file)


def _is_free(file: int) -> bool:
    """Whether its owner is gone: nobody holds the lock. Not known where the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
