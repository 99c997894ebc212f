"""A checkpoint as a table, and a check of every checksum in it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..figures import size
from . import folder as folders
from .index import BUFFER, PARAMETER, Index, Piece, SavedTensor
from .plain import decode, dtype_name
from .rank_file import Files, blocks_in, check_headers

_THREADS = 8


@dataclass(frozen=True)
class _Row:
    name: str
    shape: str
    dtype: str
    state: str
    steps: str
    nbytes: int


def describe(folder: Path, index: Index) -> str:
    """Write a line for each parameter and buffer, and the rest below."""
    rows = list(_rows(index))
    head = _Row("name", "shape", "dtype", "state", "updates", 0)
    widths = [max(len(getattr(row, field)) for row in (head, *rows)) for field in ("name", "shape", "dtype", "state")]
    lines = [f"{folder}: step {index.step}, {size(sum(index.files.values()))} in {len(index.files)} file(s)"]
    lines += [f"  {name}: {value}" for name, value in (*index.configuration.items(), *index.versions.items())]
    lines.append(f"  saved: as number {index.number} in its folder")
    lines += [""]
    for row in (head, *rows):
        fields = zip((row.name, row.shape, row.dtype, row.state), widths, strict=True)
        shown = "size" if row is head else size(row.nbytes)
        lines.append("  ".join(value.ljust(width) for value, width in fields) + f"  {row.steps:>8}  {shown:>9}")
    lines += ["", *_others(index)]
    return "\n".join(lines)


def _rows(index: Index) -> Iterator[_Row]:
    steps = index.steps()
    beside: dict[str, list[SavedTensor]] = {}
    for (kind, name), tensor in index.tensors.items():
        if kind not in (PARAMETER, BUFFER):
            beside.setdefault(name, []).append(tensor)
    for (kind, name), tensor in index.tensors.items():
        if kind in (PARAMETER, BUFFER):
            state = beside.get(name, []) if kind == PARAMETER else []
            spec = tensor.spec
            yield _Row(
                name,
                str(list(spec.shape)),
                dtype_name(spec.dtype) if kind == PARAMETER else f"{dtype_name(spec.dtype)}, buffer",
                ", ".join(f"{of.spec.kind} {dtype_name(of.spec.dtype)}" for of in state),
                f"{steps[name]:g}" if name in steps and kind == PARAMETER else "",
                sum(of.spec.numel * of.spec.dtype.itemsize for of in (tensor, *state)),
            )


def _others(index: Index) -> Iterator[str]:
    for alias, first in index.aliases.items():
        yield f"{alias} is tied to {first}"
    for number, optimizer in enumerate(index.optimizers):
        for place, group in enumerate(optimizer.groups):
            options = {name: decode(value) for name, value in group.items() if name != "params"}
            yield f"optimizer {number}, group {place} of {len(group['params'])} parameters: {options}"
    for what, there in (("scaler", index.scalers), ("scheduler", index.schedulers)):
        for state in there:
            yield f"{what}: {decode(state)}"
    if index.extra is not None:
        yield f"extra: {decode(index.extra)}"


def verify(folder: Path, index: Index) -> list[str]:
    """Read every byte, several files at a time, and compare checksums. Returns what is wrong, a line each."""
    pieces: dict[str, list[tuple[SavedTensor, Piece]]] = {}
    for tensor in index.tensors.values():
        for piece in tensor.pieces:
            pieces.setdefault(piece.file, []).append((tensor, piece))
    try:
        check_headers(folder, index, 0, 1)
    except CheckpointError as error:
        return [str(error)]
    with ThreadPoolExecutor(_THREADS) as pool:
        found = pool.map(lambda of: _verify_file(folder, of), pieces.values())
        return sorted(problem for of_file in found for problem in of_file)


def _verify_file(folder: Path, pieces: list[tuple[SavedTensor, Piece]]) -> list[str]:
    problems = []
    with Files(folder) as files:
        pieces = sorted(pieces, key=lambda of: of[1].offset)
        for block in (block for tensor, piece in pieces for block in blocks_in(tensor, piece)):
            try:
                files.read_block(block)
            except CheckpointError as error:
                problems.append(str(error))
    return problems


def inspect(path: Path, *, quick: bool) -> tuple[str, list[str]]:
    """Describe a checkpoint, or the newest whole one of several. Returns the text, and what is wrong, a line each.

    ``quick``: without reading the tensors. Raises CheckpointError where there is none.
    """
    folder, index, problems = folders.newest(path)
    return describe(folder, index), problems + ([] if quick else verify(folder, index))
