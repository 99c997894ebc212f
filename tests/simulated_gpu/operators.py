"""Which memory an operator of torch uses, for a ``TorchDispatchMode`` that looks at all of them."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# What looks at a tensor's description, and not at its values.
_DESCRIBES = {"_has_compatible_shallow_copy_type", "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty"}
_DESCRIBES |= {"new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like", "set_"}
_DESCRIBES |= {"zeros_like"}
_NO_TENSORS = {"int", "float", "bool", "str", "number", "List[int]", "Device", "Optional[int]", "Optional[float]"}
_NO_TENSORS |= {"Optional[bool]", "Optional[str]", "Optional[number]", "Optional[List[int]]", "Optional[Device]"}


@functools.cache
def _used_arguments(func: Any) -> tuple[tuple[int, str, str, bool], ...]:
    """Of the operator's arguments those that can be tensors, unless it looks at descriptions alone: place, name,
    "op(argument)", and whether it is written. A view uses nothing: it only describes memory."""
    schema = func._schema
    writes = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
    views = not any(writes) and any(result.alias_info is not None for result in schema.returns)
    if views or schema.name.split("::")[1] in _DESCRIBES:
        return ()
    return tuple(
        (place, argument.name, f"{schema.name}({argument.name})", write)
        for place, (argument, write) in enumerate(zip(schema.arguments, writes, strict=True))
        if str(argument.type) not in _NO_TENSORS
    )


def uses(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, bool]]:
    """Every plain, dense tensor that the operator ``func`` reads or writes.

    Gives "op(argument)", the tensor, and whether it is written.
    """
    for place, name, what, write in _used_arguments(func):
        given = args[place] if place < len(args) else kwargs.get(name)
        for tensor in (given,) if isinstance(given, Tensor) else tree_leaves(given):
            plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter)
            if plain and tensor.layout is torch.strided:
                yield what, tensor, write
