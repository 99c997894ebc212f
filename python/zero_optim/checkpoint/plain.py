"""Plain values as JSON and back, exactly, without pickle: options of groups, schedulers, scalers, what a user adds.

A value that JSON has no form for becomes an object whose first key begins with ``$``::

    (0.9, 0.999)        {"$tuple": [0.9, 0.999]}
    inf                 {"$float": "inf"}
    {3: "a"}            {"$dict": [[3, "a"]]}
    Counter({30: 1})    {"$Counter": [[30, 1]]}
    b"ab"               {"$bytes": "YWI="}
    tensor([1, 2])      {"$tensor": "AQAAAAAAAAACAAAAAAAAAA==", "dtype": "int64", "shape": [2]}
"""

from __future__ import annotations

import base64
import ctypes
import math
import numbers
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 2**20
"""The largest tensor among plain values. A larger one belongs into the model, as a buffer, saved as a tensor."""

_DEEPEST = 100
_MOST_BITS = 10_000  # Python reads no integer from a text of more than 4300 digits
_DICTS = (OrderedDict, Counter)


def encode(value: Any, where: str, depth: int = 0) -> Any:
    """Turn a value into what ``json.dumps`` takes. Raises TypeError for one that is not plain.

    ``where``: names the value in messages.

    A subclass of a number or a string, such as an enum or NumPy's, is decoded as the plain value.
    """
    if depth > _DEEPEST:
        raise TypeError(f"{where[:100]}... is nested more than {_DEEPEST} deep, or contains itself")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of an enum: its value
    if isinstance(value, int | float) or type(value).__module__ == "numpy" and isinstance(value, numbers.Real):
        return _encode_number(value, where)
    if type(value) is list:
        return [encode(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, f"{where}[{place}]", depth + 1) for place, item in enumerate(value)]}
    if type(value) in (dict, *_DICTS):
        return _encode_dict(value, where, depth)
    if type(value) in (bytes, bytearray):
        return {f"${type(value).__name__}": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be written without pickle: "
        "give numbers, strings, bytes, tensors, and lists, tuples and dicts of them"
    )


def _encode_number(value: Any, where: str) -> Any:
    if isinstance(value, numbers.Integral):
        if int(value).bit_length() > _MOST_BITS:
            raise TypeError(
                f"{where} is an integer of {int(value).bit_length()} bits, and here {_MOST_BITS} are the most"
            )
        return int(value)
    number = float(value)
    return number if math.isfinite(number) else {"$float": repr(number)}


def _encode_dict(value: Mapping[Any, Any], where: str, depth: int) -> Any:
    named = {key: encode(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    plain = all(isinstance(key, str) and not key.startswith("$") for key in named)
    if plain and type(value) is dict:
        return named
    return {f"${type(value).__name__}": [[encode(key, f"a key of {where}"), item] for key, item in named.items()]}


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
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
    shape = list(value.shape)
    return {"$tensor": base64.b64encode(data).decode(), "dtype": dtype_name(value.dtype), "shape": shape}


def decode(value: Any) -> Any:
    """Decode what ``encode`` gave. Raises ValueError for anything else."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return _decode_tensor(value)
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


def _decode_tensor(value: Mapping[str, Any]) -> Tensor:
    dtype, data = dtype_named(value["dtype"]), bytearray(base64.b64decode(value["$tensor"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(value["shape"])


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype, as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Find a dtype by name. Raises ValueError for one that this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype
