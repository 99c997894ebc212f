"""Make an ``Index`` of the bytes of ``index.json``, and check all that it says.

A checksum tells that the index is what was written. It does not tell that what was written makes sense: another program
may have written it, or a bug of this one. Found later, a wrong value would leave a model half loaded. So all is checked
here that holds for every index that ``save`` writes.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zero_kernels import ROW

from ..errors import CheckpointError
from ..params.arrangement import Cut
from ..params.storage_order import is_storage_order
from ..rules import RULES
from ..rules.update_rule import MASTER, UpdateRule
from . import lineage
from .index import (
    BUFFER,
    FORMAT,
    PARAMETER,
    VERSIONS,
    Index,
    Key,
    Piece,
    SavedOptimizer,
    SavedTensor,
    TensorSpec,
    canonical,
    check_whole,
    version_for,
)
from .lineage import Lineage
from .plain import decode, dtype_named
from .safetensors_file import BLOCK_BYTES, NAMES

SHARDED = "Sharded"
"""The prefix of the names of our optimizers in an index. The rule's name follows."""

OURS: Mapping[str, type[UpdateRule]] = {f"{SHARDED}{name}": rule for name, rule in RULES.items()}
"""The rules that come with the package, by the names of their optimizers."""


def same_state(name: str) -> frozenset[str]:
    """List the optimizers with the same state as the one called ``name``, itself included."""
    for own, rule in OURS.items():
        if name in (own, *rule.counterparts):
            return rule.counterparts | {own}
    return frozenset((name,))


_HEAD = frozenset(("format", "version", "lineage", "crc32c", "contents"))
HEAD_BYTES = 1024
"""So many bytes at the beginning of an index hold its lineage."""

_FILE = re.compile(r"rank-(0|[1-9][0-9]*)\.safetensors")
_CHECKSUM = re.compile(r"[0-9a-f]{8}")
_MOST = 2**63 - 1
_MOST_STEPS = 2**53  # above, a float64 does not count any more


def from_json(text: bytes, crc32c: Any, path: object) -> Index:
    """Read the index in ``text``, from ``path``. Raises CheckpointError for one that is damaged or foreign."""
    try:
        read = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged or cut off: {error}") from error
    if not isinstance(read, dict) or read.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the index of a checkpoint of zero_optim")
    contents, version = read.get("contents"), read.get("version")
    if type(version) is not int or version not in VERSIONS:
        raise CheckpointError(
            f"{path} has version {str(version)[:20]} of the format, and this zero_optim "
            f"reads versions {VERSIONS[0]} to {VERSIONS[-1]}. "
            f"It was written by zero_optim {_writer(contents)}: use that one, or a later one"
        )
    unknown = read.keys() - _HEAD
    if unknown or crc32c(canonical(contents)) != read.get("crc32c"):
        why = f"it has {min(unknown)!r}" if unknown else "its checksum is not that of its contents"
        raise CheckpointError(f"{path} is damaged: {why}")
    # Any exception comes of a wrong value: no code of a user's runs here.
    try:
        of_lineage = _read_lineage(read, crc32c)
        return _from_contents(contents, version, of_lineage)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {type(error).__name__}: {str(error)[:1000]}") from error


def lineage_from_json(text: bytes, crc32c: Any) -> Lineage | None:
    """Read the lineage alone, from the beginning of an index or all of it. None where it cannot be read."""
    head, found, _ = text[:HEAD_BYTES].partition(b',"contents":')
    try:
        read = json.loads(head + b"}" if found else text)
        return _read_lineage(read, crc32c) if read["format"] == FORMAT else None
    except Exception:
        return None


def _read_lineage(read: Mapping[str, Any], crc32c: Any) -> Lineage:
    if "lineage" not in read:
        return Lineage()
    of_lineage = dict(read["lineage"])
    if of_lineage.pop("crc32c", None) != crc32c(canonical(of_lineage)):
        raise ValueError("the checksum of its lineage is another")
    return lineage.from_json(of_lineage)


def _writer(contents: Any) -> str:
    versions = contents.get("versions") if isinstance(contents, dict) else None
    written = versions.get("zero_optim") if isinstance(versions, dict) else None
    return written[:40] if isinstance(written, str) else "another version"


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is no number of JSON")


# -- the contents ------------------------------------------------------------------------------------------------------


def _from_contents(contents: Any, version: int, of_lineage: Lineage) -> Index:
    tensors = [_tensor(entry) for entry in _of(list, contents["tensors"], "tensors")]
    optimizers = [SavedOptimizer(**entry) for entry in _of(list, contents["optimizers"], "optimizers")]
    by_key = {tensor.spec.key: tensor for tensor in tensors}
    _need(len(by_key) == len(tensors), "a tensor is there twice, or more often")
    index = Index(**{**contents, "tensors": by_key, "optimizers": optimizers, "lineage": of_lineage})
    _check_tensors(index, version)
    check_beside_tensors(index)
    return index


def check_beside_tensors(index: Index) -> None:
    """Check what an index says of optimizers, and all else that is no tensor. Raises for what no load would take."""
    _check_optimizers(index)
    _check_others(index)


def _need(good: bool, problem: str) -> None:
    if not good:
        raise ValueError(problem)


def _of(kind: type, value: Any, what: str, name: str | None = None) -> Any:
    """Check the type. ``what``, of the tensor ``name``, is put into words on failure alone: that takes longer than the
    check, and an index has many values."""
    if type(value) is not kind:
        raise ValueError(f"{what}{'' if name is None else f' {name!r}'} cannot be {str(value)[:100]}")
    return value


def _count(value: Any, what: str, name: str | None = None) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{what}{'' if name is None else f' {name!r}'} cannot be {str(value)[:100]}")
    return value


def _names(value: Any, what: str) -> list[str]:
    """Check that ``value`` is a list of texts, each there once."""
    _need(len(set(_of(list, value, what))) == len(value), f"{what} names one twice")
    return [_of(str, name, f"a name of {what}") for name in value]


# -- tensors -----------------------------------------------------------------------------------------------------------


def _tensor(entry: Any) -> SavedTensor:
    name, kind = _of(str, entry["name"], "a tensor's name"), _of(str, entry["kind"], "a tensor's kind")
    if kind == "":
        raise ValueError(f"the kind of {name!r} is empty")
    sizes = _of(list, entry["shape"], "the shape of", name)
    shape = tuple([_count(size, "a size of", name) for size in sizes])
    order = tuple(_of(list, entry["order"], "the order of", name)) if "order" in entry else None
    cut = _cut(entry["cut"], name, shape) if "cut" in entry else None
    rows_of = _rows_of(entry["rows_of"], name, shape) if "rows_of" in entry else None
    dtype = dtype_named(_of(str, entry["dtype"], "the dtype of", name))
    spec = TensorSpec(name, kind, shape, dtype, order, cut, rows_of)
    if dtype not in NAMES:
        raise ValueError(f"the {spec.label} has {dtype}, which safetensors cannot hold")
    if spec.numel * dtype.itemsize > _MOST:
        raise ValueError(f"the {spec.label} has shape {shape}")
    of_rows = len(shape) == 1 and kind not in (PARAMETER, BUFFER)
    if not is_storage_order(order, len(order) if of_rows and order is not None else len(shape)):
        raise ValueError(f"the {spec.label} of shape {shape} has dimensions in an unknown order, {order}")
    pieces = _of(list, entry["pieces"], "the pieces of", name)
    return SavedTensor(spec, tuple([_piece(spec, piece) for piece in pieces]))


def _cut(read: Any, name: str, shape: Sequence[int]) -> Cut:
    what = f"the cut of {name!r}"
    _need(len(_of(list, read, what)) == 2, f"{what} cannot be {str(read)[:100]}")
    dim, sizes = _count(read[0], what), tuple(_count(size, what) for size in _of(list, read[1], what))
    stack = dim == 0 and set(sizes) == {1}  # cut along dimension 0 there is nothing to say otherwise
    good = (0 < dim < len(shape) or stack) and shape and sum(sizes) == shape[dim]
    _need(bool(good), f"{what} cannot be {str(read)[:100]} of shape {shape}")
    return Cut(dim, sizes)


def _rows_of(read: Any, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    what = f"the slices of {name!r}"
    counts = tuple(_count(count, what) for count in _of(list, read, what))
    _need((sum(-(-count // ROW) for count in counts),) == shape, f"{what}, {counts}, do not have {shape} rows")
    return counts


def _piece(spec: TensorSpec, read: Mapping[str, Any]) -> Piece:
    piece = Piece(**{**read, "crc32c": tuple(_of(list, read["crc32c"], "the checksums of a piece of", spec.name))})
    for value in (piece.start, piece.length, piece.offset):
        _count(value, "the place of a piece of", spec.name)
    if piece.length == 0:
        raise ValueError(f"a piece of the {spec.label} is empty")
    for checksum in piece.crc32c:
        if type(checksum) is not str or _CHECKSUM.fullmatch(checksum) is None:
            raise ValueError(f"a piece of the {spec.label} has checksums that are none")
    return piece


def _check_tensors(index: Index, version: int) -> None:
    files = _of(dict, index.files, "files")
    for name, nbytes in files.items():
        _need(_FILE.fullmatch(name) is not None, f"{name!r} is no rank's file")
        _count(nbytes, f"the size of {name}")
    orders: dict[str, set[Any]] = {}
    for tensor in index.tensors.values():
        check_whole(tensor)
        for piece in tensor.pieces:
            _check_piece(tensor.spec, piece, files)
        if tensor.spec.kind not in (PARAMETER, BUFFER):
            orders.setdefault(tensor.spec.name, set()).add(tensor.spec.order)
    _check_orders(index, orders, version)


def _check_piece(spec: TensorSpec, piece: Piece, files: Mapping[str, int]) -> None:
    nbytes = piece.length * spec.dtype.itemsize
    if type(piece.file) is not str or piece.file not in files or piece.offset + nbytes > files[piece.file]:
        raise ValueError(f"a piece of the {spec.label} lies outside of {str(piece.file)[:100]!r}")
    if len(piece.crc32c) != -(-nbytes // BLOCK_BYTES):
        raise ValueError(f"a piece of the {spec.label} has {len(piece.crc32c)} checksums for {nbytes} bytes")


def _check_orders(index: Index, orders: Mapping[str, set[Any]], version: int) -> None:
    """Check that all state of a parameter has one order: the parameter's, where that has one."""
    own_version = version_for([tensor.spec for tensor in index.tensors.values()], index.optimizers)
    _need(version == own_version, f"tensors are arranged as in version {own_version} of the format, not {version}")
    for name, of_state in orders.items():
        parameter = index.tensors.get((PARAMETER, name))
        if parameter is None:
            raise ValueError(f"there is state of {name!r}, which is no parameter")
        own = {parameter.spec.order} - {None}
        _need(len(of_state | own) == 1, f"the state of {name!r} has dimensions in several orders")


# -- optimizers --------------------------------------------------------------------------------------------------------


def _check_optimizers(index: Index) -> None:
    parameters = {name for kind, name in index.tensors if kind == PARAMETER}
    state = {name for kind, name in index.tensors if kind not in (PARAMETER, BUFFER)}
    seen: set[str] = set()
    for number, optimizer in enumerate(index.optimizers):
        what = f"optimizer {number}"
        own = _check_groups(optimizer, what)
        _need(own <= parameters, f"{what} has parameters that are not there: {_some(own - parameters)}")
        _need(not own & seen, f"{what} has parameters that one before it has: {_some(own & seen)}")
        seen |= own
        _check_steps(optimizer, own, own & state, what)
        _check_master(optimizer, index.tensors, own, what)
        for kind, codec in _of(dict, optimizer.codecs, f"the codecs of {what}").items():
            _need(type(codec) is str and codec != "", f"the codec of {kind!r} cannot be {str(codec)[:100]}")
    for number, optimizer in enumerate(index.optimizers):
        others = set(_names(optimizer.order, f"the order of optimizer {number}")) - seen
        _need(not others, f"the order of optimizer {number} has parameters that none has: {_some(others)}")
    if index.optimizers and all(optimizer.name in OURS for optimizer in index.optimizers):
        _need(state <= seen, f"there is state that no optimizer has: {_some(state - seen)}")


def _check_groups(optimizer: SavedOptimizer, what: str) -> set[str]:
    """Check an optimizer's groups. Returns the names of all its parameters."""
    _of(str, optimizer.name, f"the name of {what}")
    names: list[str] = []
    options: list[dict[str, Any]] = []
    for group in _of(list, optimizer.groups, f"the groups of {what}"):
        names += [_of(str, name, f"a parameter of {what}") for name in _of(list, group["params"], f"a group of {what}")]
        options.append(_of(dict, decode({**group, "params": None}), f"a group of {what}"))
    if optimizer.name in OURS:
        _need(len(set(names)) == len(names), f"{what} has a parameter twice")
        for number, group in enumerate(options):
            OURS[optimizer.name]().check_ranges(number, group)
    return set(names)


def _check_steps(optimizer: SavedOptimizer, own: set[str], with_state: set[str], what: str) -> None:
    """Check the counts. Our optimizers count updates of all parameters with state, as floats; others may count none."""
    steps = _of(dict, optimizer.steps, f"the updates of {what}")
    for name, count in steps.items():
        good = type(count) in (int, float) and 0 <= count <= _MOST_STEPS and count == math.floor(count)
        _need(good, f"{what} counts {str(count)[:100]} updates of {name!r}")
    others = steps.keys() - own
    _need(not others, f"{what} counts updates of parameters that it does not have: {_some(others)}")
    if optimizer.name in OURS:
        uncounted = with_state - steps.keys()
        _need(not uncounted, f"{what} does not count the updates of {_some(uncounted)}")
        _need(all(type(count) is float for count in steps.values()), f"{what} counts updates in another type of number")


def _check_master(optimizer: SavedOptimizer, tensors: Mapping[Key, SavedTensor], own: set[str], what: str) -> None:
    """Check that only a sharded optimizer has masters, of the parameters' shape."""
    master, sharded = optimizer.master, optimizer.name.startswith(SHARDED)
    good = master is None or (sharded and type(master) is str and master not in (PARAMETER, BUFFER))
    good = good and (optimizer.name not in OURS or master == MASTER)
    _need(good, f"the masters of {what}, a {optimizer.name[:100]}, cannot be {str(master)[:100]}")
    for name in own:
        saved = tensors.get((str(master), name))
        same = saved is None or saved.spec.shape == tensors[PARAMETER, name].spec.shape
        _need(same, f"the master of {name!r} has another shape than it")


def _some(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)[:3]))


# -- what there is beside ----------------------------------------------------------------------------------------------


def _check_others(index: Index) -> None:
    _count(index.step, "the step")
    for alias, first in _of(dict, index.aliases, "aliases").items():
        known = type(first) is str and (PARAMETER, first) in index.tensors and (PARAMETER, alias) not in index.tensors
        _need(known, f"{alias!r} cannot be another name of {str(first)[:100]!r}")
    for what, plain in (("module_states", index.module_states), ("configuration", index.configuration)):
        _of(dict, plain, what)
    _need(all(type(text) is str for text in _of(dict, index.versions, "versions").values()), "a version is no text")
    for what, several in (("schedulers", index.schedulers), ("scalers", index.scalers)):
        decode(_of(list, several, what))
    decode(index.extra)
    decode([*index.module_states.values()])
    _check_ranks(index.ranks, len(index.files))


def _check_ranks(ranks: Sequence[Any], files: int) -> None:
    """Check the form alone. Each entry is decoded by the rank that takes it over: together they may be large."""
    _need(len(_of(list, ranks, "ranks")) == files, f"{len(ranks)} ranks are there, and the files of {files}")
    for number, own in enumerate(ranks):
        _need(type(own) is dict and own.keys() == {"random", "data"}, f"rank {number} has another form")
        _of(dict, own["random"], f"the random states of rank {number}")
