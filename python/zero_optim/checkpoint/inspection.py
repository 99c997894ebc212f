"""A checkpoint as a table, and a check of every checksum in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from ..figures import size
from . import folder as folders
from .index import BUFFER, PARAMETER, Index, SavedTensor
from .plain import decode, dtype_name
from .rank_file import Files, blocks_of_rank, check_headers


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
    """Read every byte, file by file, and compare checksums. Returns what is wrong, a line each."""
    try:
        check_headers(folder, index, 0, 1)
    except CheckpointError as error:
        return [str(error)]
    problems: list[str] = []
    with Files(folder) as files:
        for block in blocks_of_rank([*index.tensors.values()], 0, 1):
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
