"""Whole models in Hugging Face's layout: export of a checkpoint, offline, and loading, each rank its own ranges.

The layout is one file ``model.safetensors``; or several, such as ``model-00001-of-00002.safetensors``, and
``model.safetensors.index.json``, with the file of each tensor.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor, nn

from ..comm.sharding import split_runs
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
_WHERE = "load_safetensors"


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    """The result of an export: ``nbytes`` of tensors, in ``files``."""

    folder: Path
    tensors: int
    nbytes: int
    files: Sequence[str]


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
    weights = _weights(index, dtype, average)
    shards = _split(weights, max_shard_bytes)
    total = sum(entry.nbytes for entry in weights)
    target = Path(out).absolute()
    writing = target.with_name(f".writing-{target.name}")
    try:
        if target.exists() and any(target.iterdir()):
            raise CheckpointError(f"{target} is there already, and not empty: give another folder")
        shutil.rmtree(writing, ignore_errors=True)  # left by a process that has died
        writing.mkdir(parents=True)
        with folders.given_up_on_failure(writing):
            with Files(folder) as files:
                for name, shard in shards.items():
                    own = {entry.name for entry in shard}
                    aliases = {alias: first for alias, first in index.aliases.items() if first in own}
                    write_entries(writing / name, shard, _values(files, shard, weights), lambda block: None, aliases)
            if len(shards) > 1:
                place = {entry.name: name for name, shard in shards.items() for entry in shard}
                content = json.dumps({"metadata": {"total_size": total}, "weight_map": place}, indent=2)
                folders.write_synced(writing / _INDEX, content.encode())
            folders.publish_folder(writing, target)
    except OSError as error:
        raise CheckpointError(f"{target} could not be written: {error.strerror}") from error
    return Exported(target, len(weights), total, list(shards))


def _weights(index: Index, dtype: torch.dtype | None, average: str | None) -> dict[Entry, SavedTensor]:
    """Find what to write, and the saved tensor with the values of each."""
    kinds = dict.fromkeys(kind for kind, _ in index.tensors if index.is_state(kind))
    averages = [kind for kind in kinds if is_average(kind)]
    if average is not None and average not in averages:
        raise CheckpointError(f"there is no average {average!r} in the checkpoint: it has {averages or 'none'}")
    weights = {}
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
            source = index.precise(name) or source  # rounded once, from the master
        weights[Entry(name, wanted, spec.shape)] = source
    return weights


def _values(files: Files, entries: Sequence[Entry], weights: Mapping[Entry, SavedTensor]) -> Iterator[Tensor]:
    for entry in entries:
        whole = torch.empty(weights[entry].spec.numel, dtype=entry.dtype, device="cpu")
        files.read_into(whole, weights[entry], 0)
        yield whole


def _split(entries: Collection[Entry], most: int) -> dict[str, list[Entry]]:
    """Split tensors over files, in order, as many to a file as fit. Returns them by file name."""
    shards = [*split_runs(entries, attrgetter("nbytes"), most)]  # a larger tensor has a file to itself
    if len(shards) <= 1:
        return {_ONE_FILE: [*entries]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


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
    subject = make_subject(model, None, _WHERE)
    subject.come_to_rest()
    together(subject.comm, lambda: subject.check_not_gathered(_WHERE), _WHERE)
    names = Names(model)
    # Which ranks have the same slice matters in saving alone. Without an optimizer it may not be known yet.
    columns = replace(subject.columns, main=subject.columns.main or ColumnRanks(subject.comm))
    contents = contents_of_model(model, names, subject.comm, columns)
    holdings = contents.holdings
    stored, notes = together(subject.comm, lambda: _match(Path(path), names, holdings, strict=strict), _WHERE)
    together(subject.comm, contents.check_writable, _WHERE)  # on all ranks before one of them writes
    together(subject.comm, lambda: _read(stored, holdings, contents.values()), _WHERE)
    return notes


def _match(
    path: Path, names: Names, holdings: Sequence[Holding], *, strict: bool
) -> tuple[Mapping[str, Stored], list[str]]:
    """Find the stored tensor for each one here, by name, and what differs."""
    stored = _find(path)
    known = {holding.spec.name: names.equal_to(holding.spec.name) for holding in holdings}
    found = {name: next((stored[one] for one in of if one in stored), None) for name, of in known.items()}
    notes = []
    if missing := [name for name, where in found.items() if where is None]:
        notes.append(f"missing in {path}: {count(len(missing), 'tensor')}, {listed(missing)}")
    if unused := set(stored).difference(*known.values()):
        notes.append(f"left over in {path}: {count(len(unused), 'tensor')}, {listed([*unused])}")
    matched = {name: where for name, where in found.items() if where is not None}
    specs = [holding.spec for holding in holdings if holding.spec.name in matched]
    differences = [shape_differs(spec, matched[spec.name]) for spec in specs]
    if wrong := [difference for difference in differences if difference is not None]:
        raise StateMismatchError(f"{path} does not fit: {listed(wrong)}")
    if strict and notes:
        raise StateMismatchError(f"the model does not fit: {'; '.join(notes)}. With strict=False the others are loaded")
    return matched, notes


def _find(path: Path) -> dict[str, Stored]:
    """Find every tensor in ``path``, by name. Raises CheckpointError."""
    if path.is_file() and path.name != _INDEX:
        return read_header(path)
    folder = path.parent if path.name == _INDEX else path
    if (folder / _INDEX).exists():
        try:
            place: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
            files = {Path(name).name for name in place.values()}  # no name leads out of the folder
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / _INDEX} cannot be read: {type(error).__name__}: {error}") from error
        stored: dict[str, Stored] = {}
        for name in sorted(files):
            stored |= read_header(folder / name)
        if lost := [name for name in place if name not in stored]:
            raise CheckpointError(f"{folder / _INDEX} names tensors that no file has: {listed(lost)}")
        return stored
    if not (folder / _ONE_FILE).exists():
        raise CheckpointError(f"{folder} has no {_ONE_FILE}, and no {_INDEX}")
    return read_header(folder / _ONE_FILE)


def _read(stored: Mapping[str, Stored], holdings: Sequence[Holding], values: Iterator[Tensor]) -> None:
    with OpenFiles() as files:
        for holding, flat in zip(holdings, values, strict=True):
            where = stored.get(holding.spec.name)
            if where is not None and holding.length:
                ways = (holding.spec.arrangement, WHOLE)  # tensors in a file are whole, dimensions as they are
                read_arranged(flat, holding.start, holding.spec.shape, ways, partial(_read_range, files, where))


def _read_range(files: OpenFiles, where: Stored, target: Tensor, start: int) -> None:
    dtype = where.dtype
    for part in target.split(BLOCK_BYTES // dtype.itemsize):
        offset = where.offset + start * dtype.itemsize
        data = files.read(str(where.path), offset, part.numel() * dtype.itemsize, f"tensor {where.name!r}")
        fill(part, dtype, data, 0)
        start += part.numel()
