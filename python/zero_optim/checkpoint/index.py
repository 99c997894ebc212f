"""``index.json``: what a checkpoint holds, and where. Integers and plain values; no tensor is touched here.

``to_json`` writes it with a checksum of its contents, and ``from_json`` compares that. What has the right checksum is
what ``save`` has written, so values are not checked again.

A checkpoint holds ordinary tensors under ordinary names. A tensor is cut into pieces: flat ranges, each an entry of one
rank's file. The number of ranks, their stage and their buckets decide where the cuts are, and nothing else::

    exp_avg of 'fc.weight', shape [64, 128]    |<------ rank 0: 0..5120 ------>|<-- rank 1: 5120..8192 -->|
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import math
import numbers
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..params.storage_order import Cut, StorageOrder
from ..params.tensor_slice import Arrangement

FORMAT, VERSION = "zero-optim checkpoint", 1
NAME = "index.json"
_HEAD_BYTES = 1024  # enough of an index to read its save number

PARAMETER, BUFFER = "parameter", "buffer"
"""Kinds of tensor, beside those that an update rule names."""

MOST_BYTES = 2**20  # of a tensor among plain values: JSON is no place for a large one
_DEEPEST = 100
_MOST_BITS = 10_000  # Python reads no integer from a text of more than 4300 digits

Key = tuple[str, str]
"""Kind and name of a tensor."""


class Piece(NamedTuple):
    """A flat range of a tensor in a file.

    Attributes:
        start, length: the range of the tensor, in elements.
        offset: where the piece begins in the file, in bytes.
        crc32c: of each block of ``BLOCK_BYTES``, in hexadecimal. A part of a piece is read and checked by its blocks.
    """

    file: str
    start: int
    length: int
    offset: int
    crc32c: Sequence[str]

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True)
class TensorSpec:
    """A tensor by its name and kind, wherever its elements are.

    Attributes:
        order: of dimensions, in which flat ranges are counted; see ``storage_order``. Ranges of a sharded channels_last
            tensor are of its elements as they lie in memory. None: dimensions as they are. State with one value for a
            row of elements has the order of the parameter.
        cut: the slices of tensor-parallel ranks. Flat ranges are counted slice by slice, in each by ``order``. How
            plain slices make a whole is not known: they are saved as a stack along a new dimension 0.
        rows_of: of state with one value for a row of elements, the number of elements of each slice of the parameter,
            where there are several: each slice begins with a row of its own.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: StorageOrder = None
    cut: Cut | None = None
    rows_of: tuple[int, ...] | None = None

    @functools.cached_property
    def key(self) -> Key:
        return self.kind, self.name

    @property
    def label(self) -> str:
        return f"{self.kind} of {self.name!r}" if self.kind not in (PARAMETER, BUFFER) else f"{self.kind} {self.name!r}"

    @functools.cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def arrangement(self) -> Arrangement:
        """The way in which flat ranges are counted."""
        return Arrangement(self.order, self.cut)

    @property
    def stacked(self) -> int | None:
        """The number of plain slices in a stack; None: it is a whole tensor."""
        return len(self.cut.sizes) if self.cut is not None and self.cut.dim == 0 else None

    @property
    def is_of_rows(self) -> bool:
        """True if ``order`` is that of a parameter of another shape."""
        return self.order is not None and len(self.order) != len(self.shape)


@dataclass(frozen=True)
class FlatRange:
    """The ``length`` elements from ``start`` on of a tensor, as if it were flat."""

    spec: TensorSpec
    start: int
    length: int

    @property
    def nbytes(self) -> int:
        return self.length * self.spec.dtype.itemsize


@dataclass(frozen=True)
class SavedTensor:
    """A tensor of a checkpoint. ``pieces`` in ascending order; together they are all of it, each element once."""

    spec: TensorSpec
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer as it was saved, without its tensors.

    Attributes:
        name: of its class.
        groups: its parameter groups, as plain values; ``params`` are names.
        steps: updates that each parameter has had, by name.
        master: the kind of tensor that parameters are rounded from; None: they have no master.
        order: names in the order of its buckets. A hint: with it, and as many ranks, sums come out bit for bit. An
            optimizer with several rules is saved as one for each rule, and each has the order of all parameters.
        codecs: names of the codecs that state was stored by, by the kind of tensor; see ``rules/codec.py``.
    """

    name: str = ""
    groups: Sequence[Mapping[str, Any]] = field(default_factory=list)
    steps: Mapping[str, float] = field(default_factory=dict)
    master: str | None = None
    order: Sequence[str] = field(default_factory=list)
    codecs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Index:
    """All of a checkpoint but the values of its tensors.

    Attributes:
        step: of the training, as it was given to ``save``.
        tensors: by kind and name.
        files: bytes of each. ``headers``: the checksum of the header of each.
        aliases: other names of tied parameters, and the name that each is saved under.
        module_states: what modules' ``get_extra_state`` gave, as plain values.
        schedulers, scalers: their state dicts, as plain values.
        ranks: of each rank that saved, its random states, and the position in the data that it was given.
        extra: what the user added.
        configuration, versions: how it came about, for people.
        number: of the save: one more than the highest in the folder before it. It stands before the contents, not among
            them: to order many checkpoints no more of each is read.
    """

    step: int
    tensors: Mapping[Key, SavedTensor]
    files: Mapping[str, int]
    headers: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizers: Sequence[SavedOptimizer] = field(default_factory=list)
    module_states: Mapping[str, Any] = field(default_factory=dict)
    schedulers: Sequence[Any] = field(default_factory=list)
    scalers: Sequence[Any] = field(default_factory=list)
    ranks: Sequence[Mapping[str, Any]] = field(default_factory=list)
    extra: Any = None
    configuration: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    number: int = 0

    @functools.cached_property
    def masters(self) -> list[str]:
        """Kinds of tensor that parameters are rounded from."""
        return list(dict.fromkeys(optimizer.master for optimizer in self.optimizers if optimizer.master is not None))

    def is_state(self, kind: str) -> bool:
        """True if only an optimizer has use for the kind: parameters, buffers and masters serve a model alone, too."""
        return kind not in (PARAMETER, BUFFER, *self.masters)

    def precise(self, name: str) -> SavedTensor | None:
        """Find the source of a parameter in another dtype: its master, or itself; None: there is no such parameter."""
        # The master first: its values are rounded once, the parameter's would be rounded twice.
        there = (self.tensors.get((kind, name)) for kind in (*self.masters, PARAMETER))
        return next((saved for saved in there if saved is not None), None)

    def steps(self) -> dict[str, float]:
        """Updates of every parameter, whichever optimizer it was in."""
        return {name: count for optimizer in self.optimizers for name, count in optimizer.steps.items()}

    def updated(self) -> set[str]:
        """Names of parameters that were updated: by the count, or where none was kept by the state that they have."""
        steps = self.steps()
        counted = {name for name, count in steps.items() if count > 0}
        return counted | {name for kind, name in self.tensors if self.is_state(kind) and name not in steps}


def merge(specs: Iterable[TensorSpec], tensors: Iterable[SavedTensor]) -> dict[Key, SavedTensor]:
    """Join the pieces that each rank has written into whole tensors, in the order of ``specs``. Raises ValueError where
    ranks disagree, or where an element is in no piece, or in two."""
    known = {spec.key: spec for spec in specs}
    pieces: dict[Key, list[Piece]] = {key: [] for key in known}
    for tensor in tensors:
        if (spec := known.get(tensor.spec.key)) is None:
            raise ValueError(f"rank 0 has no {tensor.spec.label}")
        if spec != tensor.spec:
            raise ValueError(f"the ranks disagree on the {spec.label}: {spec}, and {tensor.spec}")
        pieces[spec.key].extend(tensor.pieces)
    for key, spec in known.items():
        pieces[key].sort(key=operator.attrgetter("start"))
        end = 0
        for piece in pieces[key]:
            if piece.start != end:
                low, high = sorted((piece.start, end))
                problem = "are in two pieces" if piece.start < end else "are in none"
                raise ValueError(f"of the {spec.label}, elements {low} to {high} {problem}")
            end = piece.end
        if end != spec.numel:
            raise ValueError(f"the {spec.label} has {spec.numel} elements, and its pieces {end}")
    return {key: SavedTensor(spec, pieces[key]) for key, spec in known.items()}


# -- as JSON -----------------------------------------------------------------------------------------------------------


def crc32c(data: bytes) -> str:
    """Compute a checksum, in hexadecimal. Raises CheckpointError where the package for it is missing."""
    try:
        from google_crc32c import value
    except ImportError as error:
        raise CheckpointError(
            "checkpoints have checksums, for which google-crc32c is missing: pip install google-crc32c"
        ) from error
    return f"{value(data):08x}"


def to_json(index: Index) -> bytes:
    """Write the index as JSON, with checksums."""
    contents = {name: getattr(index, name) for name in index.__dataclass_fields__ if name != "number"}
    contents["tensors"] = [_tensor_to_json(tensor) for tensor in index.tensors.values()]
    contents["optimizers"] = [vars(optimizer) for optimizer in index.optimizers]
    text = _dumps(contents)
    # A checksum of its own: the number is read without the contents.
    save = {"number": index.number, "crc32c": crc32c(_dumps(index.number))}
    head = {"format": FORMAT, "version": VERSION, "save": save, "crc32c": crc32c(text)}
    return _dumps(head)[:-1] + b',"contents":' + text + b"}"


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _tensor_to_json(tensor: SavedTensor) -> dict[str, Any]:
    spec = tensor.spec
    cut = None if spec.cut is None else [spec.cut.dim, spec.cut.sizes]
    rare = {"order": spec.order, "rows_of": spec.rows_of, "cut": cut}
    return {
        "name": spec.name,
        "kind": spec.kind,
        "shape": spec.shape,
        "dtype": dtype_name(spec.dtype),
        "pieces": [piece._asdict() for piece in tensor.pieces],
        # Left out where they are None, as of most tensors: an index has many.
        **{name: value for name, value in rare.items() if value is not None},
    }


def from_json(text: bytes, path: Path) -> Index:
    """Read the index in ``text``, from ``path``. Raises CheckpointError for one that is damaged or foreign."""
    try:
        head, _, contents = text.partition(b',"contents":')
        read = json.loads(head + b"}")
        if read["format"] != FORMAT:
            raise CheckpointError(f"{path} is not the index of a checkpoint of zero_optim")
        if read["version"] != VERSION:
            raise CheckpointError(
                f"{path} has version {str(read['version'])[:20]} of the format, and this zero_optim reads version "
                f"{VERSION}: use the zero_optim that wrote it"
            )
        if crc32c(contents[:-1]) != read["crc32c"] or contents[-1:] != b"}" or head + b"}" != _dumps(read):
            raise CheckpointError(f"{path} is damaged: its checksum is not that of its contents")
        fields = json.loads(contents[:-1])
        fields["tensors"] = {tensor.spec.key: tensor for tensor in map(_tensor_from_json, fields["tensors"])}
        fields["optimizers"] = [SavedOptimizer(**optimizer) for optimizer in fields["optimizers"]]
        return Index(**fields, number=_number(read))
    # The one place that answers for an index whose checksum is right and whose fields are not.
    except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or no index: {type(error).__name__}: {str(error)[:1000]}") from error


def read_number(path: Path) -> int:
    """Read the number of the save alone, from the first bytes of the index at ``path``. 0: it cannot be read."""
    try:
        with path.open("rb") as file:
            return _number(json.loads(file.read(_HEAD_BYTES).partition(b',"contents":')[0] + b"}"))
    except (OSError, LookupError, TypeError, ValueError, RecursionError):
        return 0


def _number(head: Mapping[str, Any]) -> int:
    number = head["save"]["number"]
    if crc32c(_dumps(number)) != head["save"]["crc32c"]:
        raise ValueError("the checksum of its save number is another")
    return int(number)


def _tensor_from_json(read: Mapping[str, Any]) -> SavedTensor:
    shape, dtype = tuple(read["shape"]), dtype_named(read["dtype"])
    order, rows_of = (tuple(read[name]) if name in read else None for name in ("order", "rows_of"))
    cut = Cut(read["cut"][0], tuple(read["cut"][1])) if "cut" in read else None
    spec = TensorSpec(read["name"], read["kind"], shape, dtype, order, cut, rows_of)
    return SavedTensor(spec, [Piece(**piece) for piece in read["pieces"]])


# -- plain values as JSON ----------------------------------------------------------------------------------------------


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """Turn a value into what ``json.dumps`` takes, exactly, without pickle. Raises TypeError for one that is not plain.

    Options of groups, schedulers, scalers and what a user adds are such values. One that JSON has no form for becomes
    an object whose first key begins with ``$``::

        (0.9, 0.999)        {"$tuple": [0.9, 0.999]}
        inf                 {"$float": "inf"}
        {3: "a"}            {"$dict": [[3, "a"]]}
        Counter({30: 1})    {"$Counter": [[30, 1]]}
        b"ab"               {"$bytes": "YWI="}
        tensor([1, 2])      {"$tensor": "AQAAAAAAAAACAAAAAAAAAA==", "dtype": "int64", "shape": [2]}

    ``where`` names the value in messages. A subclass of a number or a string, such as an enum or NumPy's, is decoded as
    the plain value.
    """
    if depth > _DEEPEST:
        raise TypeError(f"{where[:100]}... is nested more than {_DEEPEST} deep, or contains itself")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum: its value
    if isinstance(value, int | float) or type(value).__module__ == "numpy" and isinstance(value, numbers.Real):
        if not isinstance(value, numbers.Integral):
            return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
        bits = int(value).bit_length()
        if bits > _MOST_BITS:
            raise TypeError(f"{where} is an integer of {bits} bits, and here {_MOST_BITS} are the most")
        return int(value)
    if type(value) in (list, tuple):
        items = [encode(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(value)]
        return items if type(value) is list else {"$tuple": items}
    if type(value) in (dict, OrderedDict, Counter):
        named = {key: encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
        if type(value) is dict and all(isinstance(key, str) and not key.startswith("$") for key in named):
            return named
        return {f"${type(value).__name__}": [[encode(key, f"a key of {where}"), item] for key, item in named.items()]}
    if type(value) in (bytes, bytearray):
        return {f"${type(value).__name__}": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be written without pickle: "
        "give numbers, strings, bytes, tensors, and lists, tuples and dicts of them"
    )


def _encode_tensor(value: Tensor, where: str) -> Any:
    plain = type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided
    if not plain or value.is_meta or value.is_quantized:
        raise TypeError(f"{where} is a {type(value).__name__} on {value.device}: only dense tensors with values")
    if value.nbytes > MOST_BYTES:
        raise TypeError(
            f"{where} is a tensor of {value.nbytes} bytes, and here {MOST_BYTES} are the most: register it as a buffer "
            "of the model"
        )
    flat = value.detach().resolve_conj().resolve_neg().to("cpu", copy=True).contiguous().reshape(-1)
    data = base64.b64encode(ctypes.string_at(flat.data_ptr(), flat.nbytes)).decode() if flat.nbytes else ""
    return {"$tensor": data, "dtype": dtype_name(value.dtype), "shape": list(value.shape)}


def decode(value: Any) -> Any:
    """Decode what ``encode`` gave. Raises ValueError for anything else."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        dtype, data = dtype_named(value["dtype"]), bytearray(base64.b64decode(value["$tensor"]))
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
        return flat.reshape(value["shape"])
    if len(value) == 1 and (key := next(iter(value))).startswith("$"):
        if key not in _DECODERS:
            raise ValueError(f"a value of a kind that is not known here: {key}")
        return _DECODERS[key](value[key])
    return {key: decode(item) for key, item in value.items()}


_DECODERS: dict[str, Any] = {
    "$tuple": lambda items: tuple(map(decode, items)),
    "$float": float,
    "$dict": lambda pairs: {decode(key): decode(item) for key, item in pairs},
    "$OrderedDict": lambda pairs: OrderedDict((decode(key), decode(item)) for key, item in pairs),
    "$Counter": lambda pairs: Counter({decode(key): decode(item) for key, item in pairs}),
    "$bytes": base64.b64decode,
    "$bytearray": lambda text: bytearray(base64.b64decode(text)),
}


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype, as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Find a dtype by name. Raises ValueError for one that this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype
