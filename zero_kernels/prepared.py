"""Ops for calls that are alike, such as a shard's update in every step: checked once, then without a detour.

A call of `torch.ops.zero_kernels.*` goes from Python through torch's dispatcher back to Python, which checks every
argument, picks the backend, and calls the dispatcher again. For a small shard that takes longer than the update.
"""

from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from zero_kernels import dispatch, ops

OPS = ("foreach_step", "ema", "pack")
"""What can be prepared: the ops that an optimizer calls for every bucket."""


class Prepared:
    """One of `OPS`, checked at the first call alone.

    Call it with all arguments of the op, by position. Later calls must be like the first: with tensors on the same
    device that fit each other as the op wants it, and None where None was. Tensors, and the lengths of lists, may
    differ. No argument is kept.

    With a compiled backend a later call goes straight to the library. What the op would refuse with a TypeError or
    ValueError, the library refuses with a RuntimeError that says less. With any other backend the op is called. The
    first call picks the backend, and so does the first one after `use_backend` was called: these calls are checked, and
    raise what the op raises. Raises ValueError for another op.
    """

    def __init__(self, op: str) -> None:
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
        self._name = op
        self._picked: int | None = None  # `dispatch.choices` when the backend was picked
        self._run: Any = None
        self._written: Any = None  # picks the arguments that a call writes; None: the op itself tells autograd

    def __call__(self, *args: Any) -> None:
        if self._picked != dispatch.choices:
            self._pick(args)
        self._run(*args)
        if self._written is not None:
            torch.autograd.graph.increment_version(self._written(args))

    def _pick(self, args: tuple[Any, ...]) -> None:
        choices, op = dispatch.choices, ops.REGISTERED[self._name]
        device = op.check(*args)
        overload = dispatch.compiled_overload(self._name, device)
        self._run = overload or getattr(torch.ops.zero_kernels, self._name).default
        self._written = _written(args, op.mutated) if overload is not None else None
        self._picked = choices


def _written(args: tuple[Any, ...], mutated: tuple[int, ...]) -> Any:
    """Make a function that picks the tensors that are written from the arguments of a call like this one."""
    mutated = tuple(i for i in mutated if i < len(args))
    single = [i for i in mutated if isinstance(args[i], Tensor)]
    lists = [i for i in mutated if isinstance(args[i], list | tuple)]
    if not lists:
        return itemgetter(*single)
    return lambda args: [*chain.from_iterable(args[i] for i in lists), *(args[i] for i in single)]
