"""Whole models in Hugging Face's layout: export of a checkpoint, offline, and loading, each rank its own ranges.

The layout is one file ``model.safetensors``; or several, such as ``model-00001-of-00002.safetensors``, and
``model.safetensors.index.json``, which says which tensor is in which file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from ..comm.together import together
from ..errors import CheckpointError, StateMismatchError
from ..figures import count
from ..params.tensor_slice import WHOLE, read_arranged
from ..rules.options import is_average
from . import folder as folders
from .contents import ColumnRanks, Holding, Names, contents_of_model
from .index import BUFFER, PARAMETER, Index, SavedTensor
from .matching import listed, shape_differs
from .rank_file import Files, decoded, fill
from .safetensors_file import BLOCK_BYTES, Entry, OpenFiles, Stored, read_header, write_entries
from .subject import make_subject

_ONE_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """The result of an export: ``nbytes`` of tensors, in ``files``."""

    folder: Path
    tensors: int
    nbytes: int
    files: Sequence[str]


@dataclass(frozen=True)
class _Weight:
    """A tensor to be written, and the saved tensor with its values."""

    entry: Entry
    source: SavedTensor


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
    average: str | None = None,
) -> Exported:
    """Write the parameters and buffers of a checkpoint as Hugging Face's safetensors. For one process; no GPU is used.

    It takes memory for one tensor. A tied parameter is written once; the file's metadata names its other names, as
    ``safetensors.torch.save_model`` does.

    Args:
        path: a checkpoint, or the folder of several: then the newest whole one.
        out: a folder that is not there yet, or empty.
        dtype: of the parameters; masters are cast to it where it is not the saved one. Buffers keep their own.
        max_shard_bytes: of a file; a larger tensor has a file to itself.
        average: the average to write in place of the parameters, such as "ema". Frozen parameters have none, and are
            written themselves.

    Raises CheckpointError: there is no checkpoint; it is damaged; ``out`` cannot be written.
    """
    folder, index, _ = folders.newest(Path(path))
    index = decoded(index)
    weights = list(_weights(index, dtype, _check_average(index, average)))
    shards = _split(weights, max_shard_bytes)
    target = Path(out).absolute()
    writing = target.with_name(f".writing-{target.name}")
    try:
        if target.exists() and any(target.iterdir()):
            raise CheckpointError(f"{target} is there already, and not empty: give another folder")
        folders.give_up(writing)  # left by a process that has died
        writing.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{writing}: {error.strerror}") from error
    try:
        names = _file_names(len(shards))
        with Files(folder) as files:
            for name, shard in zip(names, shards, strict=True):
                own = {weight.entry.name for weight in shard}
                aliases = {alias: first for alias, first in index.aliases.items() if first in own}
                write_entries(writing / name, [w.entry for w in shard], _values(files, shard), metadata=aliases)
        total = sum(weight.entry.nbytes for weight in weights)
        if len(shards) > 1:
            _write_index(writing, names, shards, total)
        folders.publish_folder(writing, target)
    except OSError as error:
        folders.give_up(writing)
        raise CheckpointError(f"{target} could not be written: {error.strerror}") from error
    except BaseException:
        folders.give_up(writing)
        raise
    return Exported(target, len(weights), total, names)


def _check_average(index: Index, average: str | None) -> str | None:
    kinds = dict.fromkeys(kind for kind, _ in index.tensors if index.is_state(kind))
    averages = [kind for kind in kinds if is_average(kind)]
    if average is not None and average not in averages:
        raise CheckpointError(f"there is no average {average!r} in the checkpoint: it has {averages or 'none'}")
    return average


def _weights(index: Index, dtype: torch.dtype | None, average: str | None) -> Iterator[_Weight]:
    for (kind, name), source in index.tensors.items():
        if kind not in (PARAMETER, BUFFER):
            continue
        spec = source.spec
        if spec.stacked is not None:
            raise CheckpointError(
                f"the {spec.label} was saved as {spec.stacked} slices of tensor-parallel ranks, by marks that do not "
                "say how they make a whole: convert it by what made the model"
            )
        wanted = dtype if dtype is not None and kind == PARAMETER and spec.dtype.is_floating_point else spec.dtype
        if kind == PARAMETER and (average, name) in index.tensors:
            source = index.tensors[str(average), name]
        elif wanted != spec.dtype:
            source = index.precise(name) or source
        yield _Weight(Entry(name, wanted, spec.shape), source)


def _values(files: Files, weights: Sequence[_Weight]) -> Iterator[Tensor]:
    for weight in weights:
        whole = torch.empty(weight.source.spec.numel, dtype=weight.entry.dtype, device="cpu")
        files.read_into(whole, weight.source, 0)
        yield whole


def _split(weights: Sequence[_Weight], most: int) -> list[list[_Weight]]:
    """Split weights over files, in order, as many to a file as fit."""
    shards: list[list[_Weight]] = [[]]
    size = 0
    for weight in weights:
        if shards[-1] and size + weight.entry.nbytes > most:
            shards.append([])
            size = 0
        shards[-1].append(weight)
        size += weight.entry.nbytes
    return shards


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [_ONE_FILE]
    return [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _write_index(folder: Path, names: Sequence[str], shards: Sequence[Sequence[_Weight]], total: int) -> None:
    place = {weight.entry.name: name for name, shard in zip(names, shards, strict=True) for weight in shard}
    content = {"metadata": {"total_size": total}, "weight_map": place}
    folders.write_synced(folder / _INDEX, json.dumps(content, indent=2).encode())


# -- reading -----------------------------------------------------------------------------------------------------------


def load_safetensors(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Sequence[str]:
    """Collective. Load weights in Hugging Face's layout; each rank reads what it holds, and nothing else.

    At stage 3 that is 1/N of the model: give a model on ``meta`` to ``shard_module``, then load. Values are cast to the
    model's dtypes.

    Args:
        path: a folder with ``model.safetensors``, or with ``model.safetensors.index.json`` and its files; or one file.
        strict: raise where names differ; False: load tensors that are on both sides, and return what differs, a
            sentence each.

    Raises, on every rank and before anything is written: StateMismatchError, naming what does not fit; CheckpointError
    for files that are missing, cut off, or of another format.
    """
    subject = make_subject(model, None, "load_safetensors")
    subject.come_to_rest()
    together(subject.comm, lambda: subject.check_not_gathered("load_safetensors"), "load_safetensors")
    names = Names(model)
    # Which ranks have the same slice matters in saving alone. Without an optimizer it may not be known yet.
    columns = replace(subject.columns, main=subject.columns.main or ColumnRanks(subject.comm))
    contents = contents_of_model(model, names, subject.comm, columns)
    stored, notes = together(
        subject.comm, lambda: _match(Path(path), names, contents.holdings, strict=strict), "load_safetensors"
    )
    together(subject.comm, contents.check_writable, "load_safetensors")
    together(subject.comm, lambda: _read(stored, contents.holdings, contents.values()), "load_safetensors")
    return notes


def _match(
    path: Path, names: Names, holdings: Sequence[Holding], *, strict: bool
) -> tuple[Mapping[str, Stored], list[str]]:
    """Find the stored tensor for each one here, by name, and what differs."""
    stored = _find(path)
    known = {holding.spec.name: names.equal_to(holding.spec.name) for holding in holdings}
    found = {name: next((stored[one] for one in of if one in stored), None) for name, of in known.items()}
    missing = [name for name, where in found.items() if where is None]
    here = {one for of in known.values() for one in of}
    unused = [name for name in stored if name not in here]
    notes = []
    if missing:
        notes.append(f"missing in {path}: {count(len(missing), 'tensor')}, {listed(missing)}")
    if unused:
        notes.append(f"left over in {path}: {count(len(unused), 'tensor')}, {listed(unused)}")
    wrong = [
        differs
        for spec in (holding.spec for holding in holdings)
        if (where := found[spec.name]) is not None
        and (differs := shape_differs(spec, where.entry.shape, where.entry.dtype)) is not None
    ]
    if wrong:
        raise StateMismatchError(f"{path} does not fit: {listed(wrong)}")
    if strict and notes:
        raise StateMismatchError(f"the model does not fit: {'; '.join(notes)}. With strict=False the others are loaded")
    return {name: where for name, where in found.items() if where is not None}, notes


def _find(path: Path) -> dict[str, Stored]:
    """Find every tensor in ``path``, by name. Raises CheckpointError."""
    if path.is_file() and path.name != _INDEX:
        return read_header(path)
    folder = path.parent if path.name == _INDEX else path
    if (folder / _INDEX).exists():
        try:
            place: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
            files = {Path(name).name for name in place.values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / _INDEX} cannot be read: {type(error).__name__}: {error}") from error
        stored: dict[str, Stored] = {}
        for name in sorted(files):
            stored |= read_header(folder / name)
        lost = [name for name in place if name not in stored]
        if lost:
            raise CheckpointError(f"{folder / _INDEX} names tensors that no file has: {listed(lost)}")
        return stored
    if not (folder / _ONE_FILE).exists():
        raise CheckpointError(f"{folder} has no {_ONE_FILE}, and no {_INDEX}")
    return read_header(folder / _ONE_FILE)


def _read(stored: Mapping[str, Stored], holdings: Sequence[Holding], values: Iterator[Tensor]) -> None:
    try:
        with OpenFiles() as files:
            for holding, flat in zip(holdings, values, strict=True):
                where = stored.get(holding.spec.name)
                if where is not None and holding.length:
                    ways = (holding.spec.arrangement, WHOLE)  # tensors in a file are whole, dimensions as they are
                    read = partial(_read_range, files.descriptor(where.path), where)
                    read_arranged(flat, holding.start, holding.spec.shape, ways, read)
    except OSError as error:
        raise CheckpointError(f"weights cannot be read: {error.filename or ''} {error.strerror}") from error


def _read_range(file: int, where: Stored, target: Tensor, start: int) -> None:
    dtype = where.entry.dtype
    a_block = BLOCK_BYTES // dtype.itemsize
    for first in range(0, target.numel(), a_block):
        part = target[first : first + a_block]
        nbytes = part.numel() * dtype.itemsize
        data = os.pread(file, nbytes, where.offset + (start + first) * dtype.itemsize)
        if len(data) < nbytes:
            raise CheckpointError(f"{where.path} ends in the midst of {where.entry.name!r}: it was cut off")
        fill(part, dtype, data, 0)
