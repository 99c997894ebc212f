"""Helpers of the integrations: for required packages, models, optimizers and scalers."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler as TorchGradScaler

from ..errors import ParameterError
from ..full_parameters import full_model_state_dict
from ..grad_scaler import GradScaler
from ..optimizer import ShardedOptimizer, optimizers_of
from ..params.param_shard import plain_parameter
from ..params.tensor_slice import is_distributed
from ..units.sharded_model import sharded_model_of

# A style in transformers' tensor-parallel plans, used for the norms in Qwen3's attention.
_SUMMED_IN_HOOKS = "replicated_with_grad_allreduce"
_LAYER = re.compile(r"\.\d+(?=\.|$)")  # a number in the name of a module, "*" in plans


def require(integration: str, *packages: str) -> None:
    """Raise ImportError, naming the command that installs them, where packages are missing."""
    if missing := [package for package in packages if importlib.util.find_spec(package) is None]:
        raise ImportError(f"{integration} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def is_sharded(model: nn.Module) -> bool:
    """True if modules of ``model`` hold shards between forwards: stage 3, on several ranks."""
    return any(sharded.sharded for sharded in sharded_model_of(model.parameters()))


def is_cut(model: nn.Module) -> bool:
    """True if parameters are cut over tensor-parallel ranks, as ``parallelize_module`` does it."""
    return any(is_distributed(parameter) for parameter in model.parameters())


def is_in_parts(model: nn.Module) -> bool:
    """True if no rank has the whole model, so that a client cannot save its ``state_dict()``."""
    return is_sharded(model) or is_cut(model)


def whole_state_dict(model: nn.Module, *, on_all: bool = False) -> dict[str, Any]:
    """Return the whole state dict. Collective where the model is in parts: then on rank 0, or ``on_all`` ranks."""
    return full_model_state_dict(model, None if on_all else 0) if is_in_parts(model) else model.state_dict()


def check_sums(model: nn.Module) -> None:
    """Raise ParameterError where transformers adds up gradients over tensor-parallel ranks in hooks of its own.

    Those hooks run after the optimizer's, when the gradient's bucket may be in flight. And they add up the accumulated
    gradient, in which earlier micro-batches are added up already.
    """
    for root in model.modules():
        plan = getattr(root, "tp_plan", None) or {}
        for name, module in root.named_modules() if _SUMMED_IN_HOOKS in plan.values() else ():
            if getattr(module, "_is_hooked", False) and plan.get(_LAYER.sub(".*", name)) == _SUMMED_IN_HOOKS:
                raise ParameterError(
                    f"transformers cuts {name!r} as {_SUMMED_IN_HOOKS!r}: its hooks add up gradients too late for "
                    "sharded ones. Load the model whole, and cut it by torch's parallelize_module, with "
                    "SequenceParallel(sequence_dim=2, use_local_output=True) for these norms"
                )


def plain_optimizer(optimizer: Any) -> Any:
    """Unwrap an optimizer from a client's wrappers, some of which pretend to be of its class."""
    while "engine" not in vars(optimizer) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def check_optimizer(optimizer: Any, ranks: int, integration: str) -> None:
    """Raise TypeError, on several ranks, for an optimizer that does not average gradients over them."""
    if ranks > 1 and not isinstance(optimizer, ShardedOptimizer):
        raise TypeError(
            f"{integration} on {ranks} ranks leaves averaging gradients to the optimizer, and "
            f"{type(optimizer).__name__} does not do that: make a zero_optim.ShardedAdamW"
        )


@contextmanager
def entered(contexts: Iterable[AbstractContextManager[Any]]) -> Iterator[None]:
    """Enter all contexts."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def showing_averages(optimizers: Iterable[Any]) -> AbstractContextManager[None]:
    """Collective. Put averages in place of the parameters of every optimizer that keeps some."""
    return entered(opt.swap_to_ema() for opt in sharded_among(optimizers) if opt.engine.rules.averages)


def sharded_scaler(scaler: TorchGradScaler) -> GradScaler:
    """Make our scaler with the options of a client's, which on several ranks would skip a step on some of them."""
    if isinstance(scaler, GradScaler):
        return scaler
    return GradScaler(
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
    )


def sharded_among(optimizers: Iterable[Any]) -> list[ShardedOptimizer]:
    """Pick out the sharded optimizers, unwrapped."""
    return [plain for plain in map(plain_optimizer, optimizers) if isinstance(plain, ShardedOptimizer)]


def attach(models: Iterable[nn.Module]) -> None:
    """Make known to each open sharded optimizer the model that has all its parameters."""
    for model in models:
        held = {id(plain_parameter(parameter)) for parameter in model.parameters()}
        for optimizer in optimizers_of(model):
            if all(id(parameter) in held for parameter in optimizer.engine.parameters.all):
                optimizer.attach(model)


def in_place(model: nn.Module, device: torch.device) -> bool:
    """True if all parameters are on the device."""
    return all(same_place(parameter.device, device) for parameter in model.parameters())


def same_place(one: torch.device, other: torch.device) -> bool:
    """True if two names mean one device: clients write ``cpu:0``, and ``cuda`` for the current GPU."""
    if one.type != other.type or one.type == "cpu":
        return one.type == other.type
    current = torch.accelerator.current_device_index()
    return (current if one.index is None else one.index) == (current if other.index is None else other.index)
