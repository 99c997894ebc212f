"""Text as bytes: finding it, splitting it into training and validation, and drawing windows by step number."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError

VALIDATION_SHARE = 0.1
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "node_modules"}
_SKIPPED_IN_STDLIB = {"test", "tests", "idle_test", "lib2to3"}


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
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        name = f"Python standard library, {root}"
        files = [file for file in _files_below(root, _SKIPPED_IN_STDLIB) if file.suffix == ".py"]
    else:
        root, name = Path(path), path
        files = _files_below(root, set()) if root.is_dir() else [root]
    try:
        texts = [(file.relative_to(root).as_posix(), text) for file in files if (text := file.read_bytes())]
    except OSError as error:
        raise UsageError(f"--data {error.filename}: {error.strerror}") from error
    if not texts:
        raise UsageError(f"--data {root}: empty, no byte to train on")
    train, validation = split(texts)
    for part, text in (("training", train), ("validation", validation)):
        if len(text) < seq + 1:
            raise UsageError(
                f"--data {path or root}: {len(text)} bytes of {part} text, fewer than one window of {seq + 1}; "
                "give more text or a smaller --seq"
            )
    digest = hashlib.sha256(hashlib.sha256(train).digest() + hashlib.sha256(validation).digest()).hexdigest()
    bytes_of = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (train, validation)]
    return Corpus(name, bytes_of[0], bytes_of[1], digest)


def split(texts: list[tuple[str, bytes]]) -> tuple[bytes, bytes]:
    """Split named texts, none of them empty, into training bytes and about a tenth of validation bytes.

    Texts are kept whole: in the order of the SHA-256 of their names they go into validation until it has a tenth. A
    text of more than half of all bytes is for training. A single text is cut: its tail is for validation.
    """
    if len(texts) == 1:
        text = texts[0][1]
        cut = len(text) - int(len(text) * VALIDATION_SHARE)
        return text[:cut], text[cut:]
    total = sum(len(text) for _, text in texts)
    train: list[bytes] = []
    validation: list[bytes] = []
    taken = 0
    for _, text in sorted(texts, key=lambda item: hashlib.sha256(item[0].encode()).digest()):
        if taken < total * VALIDATION_SHARE and len(text) <= total / 2:
            validation.append(text)
            taken += len(text)
        else:
            train.append(text)
    return b"".join(train), b"".join(validation)


def draw_windows(text: Tensor, seq: int, numbers: range, *, seed: int, step: int) -> Tensor:
    """Draw random windows ``[len(numbers), seq + 1]`` int64. A pure function, so resuming replays nothing.

    ``numbers`` count a step's windows over ranks and micro-batches: any number of ranks draws the same windows.
    """
    keys = (hashlib.sha256(f"{seed}/{step}/{number}".encode()).digest() for number in numbers)
    starts = [int.from_bytes(key[:8], "little") % (text.numel() - seq) for key in keys]
    return _windows_at(text, torch.tensor(starts), seq)


def fixed_windows(text: Tensor, seq: int, count: int) -> Tensor:
    """Cut out at most ``count`` windows ``[n, seq + 1]`` int64, evenly spaced and never overlapping."""
    count = max(1, min(count, text.numel() // (seq + 1)))
    starts = torch.arange(count) * (text.numel() - seq - 1) // max(1, count - 1)
    return _windows_at(text, starts, seq)


def unigram_entropy(text: Tensor) -> float:
    """Entropy in nats per byte of the text's own byte counts: no model that ignores context can do better on it."""
    counts = torch.bincount(text, minlength=256).double()
    return torch.special.entr(counts / counts.sum()).sum().item()


def _windows_at(text: Tensor, starts: Tensor, seq: int) -> Tensor:
    return text[starts[:, None] + torch.arange(seq + 1)].long()


def _files_below(root: Path, skipped: set[str]) -> list[Path]:
    """Regular, visible files in name order."""
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in skipped | _SKIPPED_FOLDERS)
        found.extend(Path(folder, name) for name in sorted(names) if name[0] != ".")
    files = [file for file in found if file.is_file()]
    if not files:
        raise UsageError(f"--data {root}: the folder holds no file to train on")
    return files
