"""The hooks that autograd calls for each parameter: before it adds to a gradient, and after.

::

    accumulate ──> prehook: about to add      ──> .grad += ... ──> post-accumulate hook: ready
                   (several ranks alone)

They go on the node that accumulates, not on the tensor: a tensor's own hooks run under ``torch.autograd.grad`` too,
which accumulates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor


class GradHooks:
    """The hooks of one optimizer's parameters, by index.

    Args:
        before: called with the index, and what is to be added, before autograd adds to a gradient; None: no such hook.
        ready: called with the index and the parameter when a gradient is there.
    """

    def __init__(self, before: Callable[[int, Any], None] | None, ready: Callable[[int, Tensor], None]) -> None:
        self._before, self._ready = before, ready
        self._nodes: dict[int, torch.autograd.graph.Node] = {}  # the parameters alone do not keep them
        self._post: dict[int, dict[int, object]] = {}  # of each parameter: all hooks by id
        self._own: dict[int, int] = {}  # of each parameter: the id of ours
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @torch.enable_grad()
    def register(self, parameters: Mapping[int, Tensor]) -> None:
        for index, parameter in parameters.items():
            if parameter.requires_grad:
                self._register(index, parameter)
                continue
            parameter.requires_grad_(True)  # one that has a gradient, and is frozen by now, would take no hooks
            self._register(index, parameter)
            parameter.requires_grad_(False)

    def _register(self, index: int, parameter: Tensor) -> None:
        # As get_gradient_edge does, in a quarter of the time.
        node: Any = parameter.expand_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self._nodes[index] = node
        handle = parameter.register_post_accumulate_grad_hook(partial(self._ready, index))
        self._post[index], self._own[index] = parameter._post_accumulate_grad_hooks, handle.id
        self._handles.append(handle)
        if self._before is not None:
            self._handles.append(node.register_prehook(partial(self._before, index)))

    def followed_by_users(self, indices: Sequence[int]) -> bool:
        """True if a hook of the user's, which may change the gradient, runs after ours at one of these."""
        if max(map(len, map(self._post.__getitem__, indices)), default=0) <= 1:
            return False  # as a rule
        return any(next(reversed(self._post[index])) != self._own[index] for index in indices)

    def accumulates(self, index: int) -> bool:
        """True if the backward under way is going to add to this parameter's gradient, or has done so."""
        return torch._C._will_engine_execute_node(self._nodes[index])

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._nodes.clear()
