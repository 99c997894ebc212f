"""Which memory an operator of torch uses, for a ``TorchDispatchMode`` that looks at all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

# What looks at a tensor's description, and not at its values.
_DESCRIBES = {"_has_compatible_shallow_copy_type", "empty_like", "full_like", "is_pinned", "is_same_size", "new_empty"}
_DESCRIBES |= {"new_empty_strided", "new_full", "new_ones", "new_zeros", "ones_like", "rand_like", "randn_like", "set_"}
_DESCRIBES |= {"zeros_like"}


def uses(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor, bool]]:
    """Every plain, dense tensor that the operator ``func`` reads or writes.

    Gives "op(argument)", the tensor, and whether it is written. A view uses nothing: it only describes memory.
    """
    schema = func._schema
    mutates = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    views = not mutates and any(result.alias_info is not None for result in schema.returns)
    if views or schema.name.split("::")[1] in _DESCRIBES:
        return
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    for argument in schema.arguments:
        write = argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tree_leaves(given.get(argument.name)):
            plain = isinstance(tensor, Tensor) and type(tensor) in (Tensor, torch.nn.Parameter)
            if plain and tensor.layout is torch.strided:
                yield f"{schema.name}({argument.name})", tensor, write
