"""Stands in the place of a module's method, so that a call of the method can be more than that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn


class StandIn:
    """Lies in a module's ``__dict__`` under the name of a method, which Python then finds before the class's own.

    Args:
        module: whose method it is.
        name: of the method.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._own = module.__dict__.get(name)  # what the module had before, where that was not its class's
        functools.update_wrapper(self, self._method(), updated=())  # clients look at a method's signature

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of its module is an ordinary one."""
        return functools.partial, (getattr(type(self._module), self._name), self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Answer the callers of the method."""
        raise NotImplementedError

    def _method(self) -> Callable[..., Any]:
        return self._own or getattr(type(self._module), self._name).__get__(self._module)

    def watch(self) -> None:
        """Take the method's place."""
        if self._module.__dict__.get(self._name) is self._own:  # else somebody has wrapped this, and calls it
            self._module.__dict__[self._name] = self

    def unwatch(self) -> None:
        """Give the method its place back."""
        if self._module.__dict__.get(self._name) is self:
            del self._module.__dict__[self._name]
            if self._own is not None:
                self._module.__dict__[self._name] = self._own
