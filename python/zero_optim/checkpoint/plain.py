"""Plain values as JSON and back, exactly, without pickle: options of groups, schedulers, scalers, what a user adds.

What JSON has no form for is an object with a single key that begins with ``$``::

    (0.9, 0.999)        {"$tuple": [0.9, 0.999]}
    inf                 {"$float": "inf"}
    {3: "a"}            {"$dict": [[3, "a"]]}
    Counter({30: 1})    {"$counter": [[30, 1]]}
    b"ab"               {"$bytes": "YWI="}
    tensor([1, 2])      {"$tensor": "AQAAAAAAAAACAAAAAAAAAA==", "dtype": "int64", "shape": [2]}
"""

from __future__ import annotations

import base64
import ctypes
import math
import numbers
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOST_BYTES = 2**20
"""Of a tensor among plain values. A larger one belongs into the model, as a buffer, where it is sharded out."""

_DICTS = (dict, OrderedDict, defaultdict, Counter)


def encode(value: Any, where: str) -> Any:
    """What ``json.dumps`` takes. ``where`` names the value in messages. Raises TypeError for what is not plain."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):  # NumPy's too
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else {"$float": repr(number)}
    if type(value) in (list, deque):
        return [encode(item, f"{where}[{place}]") for place, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, f"{where}[{place}]") for place, item in enumerate(value)]}
    if type(value) in _DICTS:
        return _encode_dict(value, where)
    if isinstance(value, bytes | bytearray):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        return _encode_tensor(value, where)
    raise TypeError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be written without pickle: "
        "give numbers, strings, bytes, tensors, and lists, tuples and dicts of them"
    )


def _encode_dict(value: Mapping[Any, Any], where: str) -> Any:
    named = {key: encode(item, f"{where}[{key!r}]") for key, item in value.items()}
    plain = all(isinstance(key, str) and not key.startswith("$") for key in named)
    if plain and type(value) is not Counter:
        return named
    pairs = [[encode(key, f"a key of {where}"), item] for key, item in named.items()]
    return {"$counter" if type(value) is Counter else "$dict": pairs}


def _encode_tensor(value: Tensor, where: str) -> Any:
    if type(value) not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        raise TypeError(f"{where} is a {type(value).__name__} on {value.device}: only dense tensors with values")
    if value.nbytes > MOST_BYTES:
        raise TypeError(
            f"{where} is a tensor of {value.nbytes} bytes, and here {MOST_BYTES} are the most: register it as a buffer "
            "of the model"
        )
    flat = value.detach().to("cpu", copy=True).contiguous().reshape(-1)
    data = ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""
    shape = list(value.shape)
    return {"$tensor": base64.b64encode(data).decode(), "dtype": dtype_name(value.dtype), "shape": shape}


def decode(value: Any) -> Any:
    """The value of what ``encode`` gave. Raises ValueError where it did not give it."""
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
    "$counter": lambda pairs: Counter({decode(key): decode(item) for key, item in pairs}),
    "$bytes": base64.b64decode,
}


def _decode_tensor(value: Mapping[str, Any]) -> Tensor:
    dtype, data = dtype_named(value["dtype"]), bytearray(base64.b64decode(value["$tensor"]))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    return flat.reshape(value["shape"])


def dtype_name(dtype: torch.dtype) -> str:
    """``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_named(name: str) -> torch.dtype:
    """Raises ValueError for a name that this torch does not have."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")
    return dtype
