"""``info``: what a checkpoint says of itself, before there is a model to load it into."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from . import folder as folders
from .index import Index
from .plain import decode


@dataclass(frozen=True)
class Info:
    """A checkpoint.

    Attributes:
        folder: where it is.
        step: of the training, as ``save`` was told.
        extra: what the user had added.
        configuration, versions: how it came about.
    """

    folder: Path
    step: int
    extra: Any
    configuration: Mapping[str, Any]
    versions: Mapping[str, str]


def info(path: str | os.PathLike[str]) -> Info:
    """Read the index of a checkpoint, or of the newest whole one in a folder of several. Not collective.

    Whole as far as the lengths of files tell: no checksum of a tensor is looked at. Raises CheckpointError where there
    is none.
    """
    folder, index = newest(Path(path))
    return Info(folder, index.step, decode(index.extra), index.configuration, index.versions)


def newest(path: Path) -> tuple[Path, Index]:
    """The index of the checkpoint that ``path`` is, or of the newest whole one in it. Raises CheckpointError."""
    problems = []
    for folder in folders.candidates(path):
        try:
            return folder, folders.read_index(folder)
        except CheckpointError as error:
            problems.append(str(error))
    raise CheckpointError("; ".join(problems) or f"{path} holds no checkpoint")
