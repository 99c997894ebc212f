"""``register_forward_method``: lets a method read parameters of a sharded model, as its ``forward`` does."""

from __future__ import annotations

from torch import nn

from .units.parts import Part
from .units.sharded_model import sharded_model_of


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let a method of a sharded model, or of a module in it, read the module's own parameters, as its ``forward`` does.

    A method that only calls modules, as ``generate`` does, works without. Registered, it has the module's unit gathered
    once for all its calls. Call it on every rank, as a forward, and use what it returns in the loss. A module that is
    not sharded is left as it is.

    Raises AttributeError where the module's class has no such method.
    """
    if not callable(getattr(type(module), name, None)):
        raise AttributeError(f"{type(module).__name__} has no method {name!r} to register")
    for model in sharded_model_of(module.parameters()):
        unit = next((unit for unit in model.units if module in unit.modules), None)
        if model.sharded and unit is not None:
            unit.add_part(Part(module, name, unit, model.units, model.schedule))
