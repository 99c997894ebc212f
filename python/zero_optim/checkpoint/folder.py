"""The folder of checkpoints: ``step-N``, each published whole by one rename, and which of them is the newest.

::

    CHECKPOINTS/step-100/index.json  rank-0.safetensors  rank-1.safetensors
    CHECKPOINTS/.writing-step-200/   one that is being written, or that a job has died in
    CHECKPOINTS/.removing-step-50/   one that is being removed
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from ..errors import CheckpointError
from . import index
from .index import Index
from .rank_file import crc32c

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LEFT = re.compile(r"\.(writing|removing)-step-[0-9]+")
_WRITING, _REMOVING = ".writing-", ".removing-"


def step_folder(path: Path, step: int) -> Path:
    return path / f"step-{step}"


def rank_file_name(rank: int) -> str:
    return f"rank-{rank}.safetensors"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint's folder is of; None for another folder."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def checkpoints(path: Path) -> list[Path]:
    """The checkpoints in ``path``, whole or not, the newest first."""
    try:
        found = [(step, at) for at in path.iterdir() if (step := step_of(at)) is not None and at.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    return [folder for _, folder in sorted(found, reverse=True)]


def candidates(path: Path) -> list[Path]:
    """What to load where a user names ``path``, one after another: that itself, or the checkpoints in it."""
    if (path / index.NAME).exists():
        return [path]
    return checkpoints(path) or ([path] if step_of(path) is not None else [])


# -- writing -----------------------------------------------------------------------------------------------------------


def begin(path: Path, step: int) -> Path:
    """Make the folder that a checkpoint is written in, and remove those that a job has died in."""
    writing = path / f"{_WRITING}step-{step}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        for left in path.iterdir():
            if _LEFT.fullmatch(left.name):
                _clear(left)
        writing.mkdir()
        there = step_folder(path, step)
        if os.path.lexists(there) and not _is_checkpoint(there):
            raise CheckpointError(f"{there} is there already, and is no checkpoint: remove it, or give another step")
    except OSError as error:
        raise CheckpointError(f"no checkpoint can be written to {path}: {error.strerror} ({error.filename})") from error
    return writing


def _clear(left: Path) -> None:
    """Remove what a job has died in. One that was to be replaced, by another that never came, is put back."""
    folder = left.with_name(left.name.removeprefix(_REMOVING))
    if left.name.startswith(_REMOVING) and not folder.exists() and problem_of(left) is None:
        left.rename(folder)
    else:
        shutil.rmtree(left, ignore_errors=True)


def _is_checkpoint(folder: Path) -> bool:
    """Whether it is one of ours, whole or not. What is a link, or has no index, is not removed."""
    return not folder.is_symlink() and (folder / index.NAME).exists()


def publish(writing: Path, written: Index) -> Path:
    """Write the index, and give the folder its name: from then on the checkpoint is there, and whole."""
    folder = step_folder(writing.parent, written.step)
    try:
        write_synced(writing / index.NAME, written.to_json(crc32c))
        publish_folder(writing, folder)
    except OSError as error:
        raise CheckpointError(f"{folder} could not be published: {error.strerror}") from error
    return folder


def write_synced(path: Path, content: bytes) -> None:
    """A small file, on the disk when this returns."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def publish_folder(writing: Path, folder: Path) -> None:
    """Give what is in ``writing``, each file synced, its name. What had it before is removed."""
    _sync_folder(writing)
    replaced = _rename_away(folder) if folder.exists() else None
    try:
        writing.rename(folder)
    except OSError:
        if replaced is not None:
            replaced.rename(folder)
        raise
    _sync_folder(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def give_up(writing: Path) -> None:
    """Remove what there is of a checkpoint that could not be written."""
    shutil.rmtree(writing, ignore_errors=True)


def keep_newest(path: Path, folder: Path, count: int) -> None:
    """Remove checkpoints older than ``folder``, but for so many whole ones that there are ``count`` with it."""
    kept = 1
    for other in checkpoints(path):
        if (step_of(other) or 0) < (step_of(folder) or 0) and _is_checkpoint(other):
            if kept == count:
                remove(other)
            elif problem_of(other) is None:
                kept += 1


def remove(folder: Path) -> None:
    """Remove a checkpoint. Raises CheckpointError."""
    try:
        shutil.rmtree(_rename_away(folder), ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be removed: {error.strerror}") from error


def _rename_away(folder: Path) -> Path:
    """By one rename a checkpoint is not there any more: it is never half there."""
    removing = folder.with_name(_REMOVING + folder.name)
    shutil.rmtree(removing, ignore_errors=True)
    return folder.rename(removing)


def _sync_folder(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# -- reading -----------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> Index:
    """The index of a checkpoint whose files are there in their full lengths. Raises CheckpointError."""
    path = folder / index.NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        why = "holds no checkpoint" if folder.is_dir() else "is not there"
        raise CheckpointError(f"{folder} {why}: {path.name} is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    read = index.from_json(text, crc32c, path)
    for name, nbytes in read.files.items():
        file = folder / name
        try:
            there = file.stat().st_size
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{file} is missing. Every rank has to see the whole checkpoint: is its folder shared by all nodes?"
            ) from error
        except OSError as error:
            raise CheckpointError(f"{file}: {error.strerror}") from error
        if there != nbytes:
            what = "was cut off" if there < nbytes else "is another file"
            raise CheckpointError(f"{file} has {there:,} bytes, and was written with {nbytes:,}: it {what}")
    return read


def latest(path: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in ``path``, as far as the lengths of files tell; None: there is none."""
    return next((folder for folder in checkpoints(Path(path)) if problem_of(folder) is None), None)


def problem_of(folder: Path) -> str | None:
    """Why a checkpoint is not whole, as far as lengths tell; None: it is."""
    try:
        read_index(folder)
    except CheckpointError as error:
        return str(error)
    return None
