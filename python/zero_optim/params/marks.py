"""Megatron's marks: attributes of a plain parameter that say what other ranks have of it.

=====================================  ================================================================================
tensor_model_parallel = True           a slice: each tensor-parallel rank has another
False, or no mark                      a copy: the same on all of them, its gradient too
sequence_parallel = True               a copy of whose gradient each of them has a term
shared = True                          a second copy of a parameter that another stage of the pipeline has, and counts
average_gradients_across_tp_domain     a copy of whose gradient the mean is wanted: refused
=====================================  ================================================================================

Marks do not say how slices make a whole: ``partition_dim`` is not enough for fused weights, as of gate and up in one.
"""

from __future__ import annotations

from torch import Tensor, nn

_SLICE, _TERM, _SHARED = "tensor_model_parallel", "sequence_parallel", "shared"
_AVERAGED = "average_gradients_across_tp_domain"


def is_slice(parameter: Tensor) -> bool:
    """Whether it is one of several slices, by its mark."""
    return bool(getattr(parameter, _SLICE, False))


def is_term(parameter: Tensor) -> bool:
    """Whether its gradient is a term of a sum over the tensor-parallel ranks."""
    return bool(getattr(parameter, _TERM, False))


def is_shared(parameter: Tensor) -> bool:
    """Whether another stage of the pipeline counts it."""
    return bool(getattr(parameter, _SHARED, False))


def is_averaged(parameter: Tensor) -> bool:
    """Whether the tensor-parallel ranks are to average its gradient."""
    return bool(getattr(parameter, _AVERAGED, False))


def says_anything(parameter: Tensor) -> bool:
    """Whether the parameter was marked at all. Megatron marks copies, too, as no slices."""
    return hasattr(parameter, _SLICE) or hasattr(parameter, _TERM)


def marked(parameter: Tensor) -> str:
    """List the marks of a parameter, for messages; empty where it has none."""
    if type(parameter) is nn.Parameter and not parameter.__dict__:
        return ""
    found = [name for name in (_SLICE, _TERM, _SHARED, _AVERAGED) if getattr(parameter, name, False)]
    return "".join(f", {name} = True" for name in found)


def take_marks(made: Tensor, parameter: Tensor) -> None:
    """Copy the marks, with all other attributes, to ``made``, which takes the place of ``parameter``."""
    vars(made).update(vars(parameter))
