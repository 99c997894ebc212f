"""Text as bytes: finding it, splitting it into training and validation, and drawing windows by step number."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError

_SKIPPED = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
_SKIPPED_IN_STDLIB = {*_SKIPPED, "test", "tests", "idle_test", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """Training and validation text, uint8 ``[bytes]`` each; ``digest`` is a SHA-256 of both."""

    name: str
    train: Tensor
    validation: Tensor
    digest: str


def load_corpus(path: str | None, seq: int) -> Corpus:
    """Read a file, a folder, or (None) the source of the Python standard library.

    A folder is split by file, a single file by position. Hidden files and folders are left out. Raises UsageError for a
    path that is unreadable, empty, or too small for one window of ``seq`` + 1 bytes on either side of the split.
    """
    root = Path(path or sysconfig.get_paths()["stdlib"])
    files = [root]
    if root.is_dir():
        files = [*_files_below(root, _SKIPPED)] if path else [*_files_below(root, _SKIPPED_IN_STDLIB, ".py")]
    try:
        texts = [(file.relative_to(root).as_posix(), text) for file in files if (text := file.read_bytes())]
    except OSError as error:
        raise UsageError(f"--data {error.filename}: {error.strerror}") from error
    if not texts:
        raise UsageError(f"--data {root}: empty, no byte to train on")
    parts = split(texts)
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) < seq + 1:
            few = f"{len(part)} bytes of {name} text, fewer than one window of {seq + 1}"
            raise UsageError(f"--data {root}: {few}; give more text or a smaller --seq")
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).hexdigest()
    train, validation = (torch.frombuffer(part, dtype=torch.uint8) for part in parts)
    return Corpus(path or f"Python standard library, {root}", train, validation, digest)


def _files_below(root: Path, skipped: set[str], suffix: str = "") -> Iterator[Path]:
    """Find regular, visible files, in any order."""
    for folder, folders, names in os.walk(root):
        # In place: os.walk enters the folders that are left in its list.
        folders[:] = [name for name in folders if name[0] != "." and name not in skipped]
        files = (Path(folder, name) for name in names if name[0] != "." and name.endswith(suffix))
        yield from (file for file in files if file.is_file())


def split(texts: Sequence[tuple[str, bytes]]) -> tuple[bytearray, bytearray]:
    """Split named texts into training bytes and a tenth of validation bytes, by the SHA-256 of the names.

    So whole texts are held out, but for one that both sides have a part of: of a single text validation has the tail.
    """
    ordered = sorted(texts, key=lambda item: hashlib.sha256(item[0].encode()).digest(), reverse=True)
    text = bytearray().join(text for _, text in ordered)
    cut = len(text) - len(text) // 10
    return text[:cut], text[cut:]


def draw_windows(text: Tensor, seq: int, numbers: range, *, seed: int, step: int) -> Tensor:
    """Draw random windows ``[len(numbers), seq + 1]`` int64. ``numbers``: of a step's, over ranks and micro-batches."""
    # A hash, and no generator's state: any number of ranks draws the same windows, and a resumed run replays nothing.
    keys = (hashlib.sha256(f"{seed}/{step}/{number}".encode()).digest() for number in numbers)
    starts = [int.from_bytes(key[:8], "little") % (text.numel() - seq) for key in keys]
    return text[torch.tensor(starts)[:, None] + torch.arange(seq + 1)].long()


def fixed_windows(text: Tensor, seq: int, count: int) -> Tensor:
    """Cut out at most ``count`` windows ``[n, seq + 1]`` int64, evenly spaced and never overlapping."""
    count = max(1, min(count, text.numel() // (seq + 1)))
    starts = torch.arange(count) * (text.numel() - seq - 1) // max(1, count - 1)
    return text[starts[:, None] + torch.arange(seq + 1)].long()


def unigram_entropy(text: Tensor) -> float:
    """Entropy in nats per byte of the text's own byte counts: no model that ignores context can do better on it."""
    counts = torch.bincount(text, minlength=256).double()
    return torch.special.entr(counts / counts.sum()).sum().item()
