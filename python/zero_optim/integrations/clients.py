"""Helpers that the integrations share: which packages a client needs, and what is asked of models, optimizers and
scalers."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from ..full_model_state import full_model_state_dict
from ..grad_scaler import GradScaler
from ..optimizer import ShardedAdamW
from ..units.sharded_model import sharded_model_of


def require(integration: str, *packages: str) -> None:
    """Raise ImportError, naming the command that installs them, where packages are missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ImportError(f"{integration} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def is_sharded(model: nn.Module) -> bool:
    """True if modules of ``model`` hold shards between forwards: stage 3, on several ranks."""
    return any(sharded.sharded for sharded in sharded_model_of(model.parameters()))


def whole_state_dict(model: nn.Module, *, on_all: bool = False) -> dict[str, Any]:
    """Collective where the model is sharded. Its whole state dict, on rank 0 alone, or on every rank.

    A model that is not sharded gives its own on every rank.
    """
    return full_model_state_dict(model, None if on_all else 0) if is_sharded(model) else model.state_dict()


def plain_optimizer(optimizer: Any) -> Any:
    """The optimizer within a client's wrappers, some of which take on its class."""
    while "engine" not in vars(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def check_optimizer(optimizer: Any, ranks: int, integration: str) -> None:
    """Raise TypeError for one whose gradients nobody would average over the ranks."""
    if ranks > 1 and not isinstance(optimizer, ShardedAdamW):
        raise TypeError(
            f"{integration} on {ranks} ranks leaves averaging gradients to the optimizer, and "
            f"{type(optimizer).__name__} does not do that: make a zero_optim.ShardedAdamW"
        )


def without_sync(optimizers: Iterable[ShardedAdamW]) -> AbstractContextManager[Any]:
    """``no_sync`` of all of them."""
    stack = ExitStack()
    for optimizer in optimizers:
        stack.enter_context(optimizer.no_sync())
    return stack


def sharded_scaler(scaler: TorchGradScaler) -> GradScaler:
    """A scaler of ours with the options of a client's, which on several ranks would skip on some of them alone."""
    if isinstance(scaler, GradScaler):
        return scaler
    return GradScaler(
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )


def sharded_among(optimizers: Iterable[Any]) -> list[ShardedAdamW]:
    """Pick out the sharded ones, without what a client has put around them."""
    return [plain for plain in map(plain_optimizer, optimizers) if isinstance(plain, ShardedAdamW)]


def in_place(model: nn.Module, device: torch.device) -> bool:
    """True if all parameters are on the device."""
    return all(same_place(parameter.device, device) for parameter in model.parameters())


def same_place(one: torch.device, other: torch.device) -> bool:
    """True if two names mean one device: clients say ``cpu:0``, and ``cuda`` for the current GPU."""
    if one.type != other.type or one.type == "cpu":
        return one.type == other.type
    current = torch.accelerator.current_device_index()
    return (current if one.index is None else one.index) == (current if other.index is None else other.index)
