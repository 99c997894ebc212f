"""``register_forward_method``: a method that reads parameters of a sharded model, as its ``forward`` does."""

from __future__ import annotations

from torch import nn

from .units.parts import Part
from .units.sharded_model import sharded_model_of


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method of a sharded model, or of a module in it, read the module's own parameters, as its ``forward`` does.

    A method that only calls modules, as ``generate`` does, works without. Registered, it has the module's unit gathered
    once for all that it calls. It is to be called on every rank, as a forward is, and a loss uses what it returns. A
    module that is not sharded is left as it is.

    Raises AttributeError where the module's class has no such method.
    """
    if not callable(getattr(type(module), name, None)):
        raise AttributeError(f"{type(module).__name__} has no method {name!r} to register")
    for model in sharded_model_of(module.parameters()):
        unit = next((unit for unit in model.units if module in unit.modules), None)
        if model.sharded and unit is not None:
            unit.add_part(Part(module, name, unit, model.units, model.schedule))
