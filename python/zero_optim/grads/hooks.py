"""What autograd does to a gradient: the hooks around it, the dtype in which it accumulates, and ``main_grad``.

A layer with a fused weight gradient, as TransformerEngine's and Megatron's, adds to ``weight.main_grad`` itself, where
``weight`` has ``grad_added_to_main_grad``::

    the layer's backward    main_grad += gradient; the flag is set to True; autograd gets a dummy
    before accumulation     ``.grad`` is put aside
    after it                ``.grad`` is main_grad, and the dummy is dropped
    the bucket is packed    main_grad is zeroed
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..comm.sharding import Sharding
from ..errors import ParameterError
from ..params.tensor_slice import is_distributed

MAIN_GRAD, ADDED = "main_grad", "grad_added_to_main_grad"


def is_main_grad(parameter: Tensor, grad: Tensor | None) -> bool:
    """Whether a gradient of ``parameter`` is what its layer adds to."""
    return grad is not None and getattr(parameter, MAIN_GRAD, None) is grad


class GradHooks:
    """The hooks that autograd calls for each parameter, by index: before it adds to a gradient, and after.

    Args:
        before: called with the index, and what is to be added, before autograd adds to a gradient; None: no such hook.
        ready: called with the index and the parameter when a gradient is there.

    Attributes:
        main_grads: by index, the ``main_grad`` of each parameter that has one. It is zero but for what is not packed.
    """

    def __init__(self, before: Callable[[int, Any], None] | None, ready: Callable[[int, Tensor], None]) -> None:
        self._before, self._ready = before, ready
        self._nodes: dict[int, torch.autograd.graph.Node] = {}  # the parameters alone do not keep them
        self._post: dict[int, dict[int, object]] = {}  # of each parameter: all hooks by id
        self._own: dict[int, int] = {}  # of each parameter: the id of ours
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.main_grads: dict[int, Tensor] = {}
        self._aside: dict[int, Tensor | None] = {}  # ``.grad`` while autograd adds a dummy
        self._prepared: list[tuple[Tensor, torch.dtype | None]] = []  # with ``grad_dtype`` as it was before

    def prepare(self, parameters: Mapping[int, Tensor], labels: Sequence[str], sharding: Sharding) -> None:
        """Let autograd accumulate in the sharding's dtype, and make ``main_grad`` where a parameter is marked.

        Raises ParameterError for a mark on a parameter whose ``.grad`` cannot be its ``main_grad``.
        """
        for index, parameter in parameters.items():
            dtype = sharding.local_dtype(parameter.dtype)
            if hasattr(parameter, ADDED):
                if dtype != torch.float32 or is_distributed(parameter):
                    raise ParameterError(
                        f"{labels[index]} is {parameter.dtype} and has {ADDED}: its layer adds to an fp32 main_grad. "
                        "Make the optimizer with grad_accumulation_dtype=torch.float32; of a DTensor, delete it"
                    )
                self.main_grads[index] = main = torch.zeros_like(parameter, dtype=dtype)
                setattr(parameter, MAIN_GRAD, main)
            if parameter.dtype != dtype or index in self.main_grads:
                self._prepared.append((parameter, parameter.grad_dtype))
            if parameter.dtype != dtype:
                grad, parameter.grad = parameter.grad, None
                parameter.grad_dtype = dtype
                parameter.grad = None if grad is None else grad.to(dtype)

    def restore(self) -> None:
        """Undo ``prepare``."""
        for parameter, dtype in self._prepared:
            if parameter.grad_dtype != dtype:
                parameter.grad = None
                parameter.grad_dtype = dtype
            vars(parameter).pop(MAIN_GRAD, None)
        self._prepared.clear()
        self.main_grads.clear()

    @torch.enable_grad()
    def register(self, parameters: Mapping[int, Tensor]) -> None:
        for index, parameter in parameters.items():
            frozen = not parameter.requires_grad
            if frozen:  # it takes no hooks, and may have a gradient of before
                parameter.requires_grad_(True)
            # The hooks go on the node that accumulates, not on the tensor: a tensor's own run under
            # ``torch.autograd.grad``, too, which accumulates nothing. As get_gradient_edge, in a quarter of the time.
            node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            self._nodes[index] = node
            if index in self.main_grads:  # before the hook below, which follows all others
                own = parameter.register_post_accumulate_grad_hook(partial(self._take_main_grad, index))
                self._handles.append(own)
            handle = parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
            self._post[index], self._own[index] = parameter._post_accumulate_grad_hooks, handle.id
            self._handles.append(handle)
            if self._before is not None:
                self._handles.append(node.register_prehook(partial(self._before, index)))
            if index in self.main_grads:
                self._handles.append(node.register_prehook(partial(self._put_aside, index, parameter)))
            if frozen:
                parameter.requires_grad_(False)

    def _put_aside(self, index: int, parameter: Any, grads: Any) -> None:
        if getattr(parameter, ADDED):  # what comes is a dummy: it must not be added to what is there
            self._aside[index], parameter.grad = parameter.grad, None

    def _take_main_grad(self, index: int, parameter: Any) -> None:
        if getattr(parameter, ADDED):
            setattr(parameter, ADDED, False)
            main, before = self.main_grads[index], self._aside.pop(index, None)
            if before is None or before is main:  # main_grad has all micro-batches
                parameter.grad = main
            else:
                parameter.grad = before.add_(main)
                main.zero_()

    def followed_by_users(self, indices: Sequence[int]) -> bool:
        """True if a hook of the user's, which may change the gradient, runs after ours."""
        if max(map(len, map(self._post.__getitem__, indices)), default=0) <= 1:
            return False  # as a rule
        return any(next(reversed(self._post[index])) != self._own[index] for index in indices)

    def accumulates(self, index: int) -> bool:
        """True if the running backward adds to this parameter's gradient, or has done so."""
        return torch._C._will_engine_execute_node(self._nodes[index])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
