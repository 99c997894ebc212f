"""Loss scaling for fp16: ``torch.amp.GradScaler`` that knows sharded gradients."""

from __future__ import annotations

from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState


class _Sharded(Protocol):
    """What the scaler asks of an optimizer that unscales and skips by itself, on the device."""

    device: torch.device

    def unscale_gradients(self, inverse_scale: Tensor) -> None: ...
    def step_scaled(self, inverse_scale: Tensor | None) -> Any: ...
    def found_inf_of_step(self) -> Tensor: ...


def _is_sharded(optimizer: object) -> TypeGuard[_Sharded]:
    return hasattr(optimizer, "unscale_gradients")


class GradScaler(TorchGradScaler):
    """``torch.amp.GradScaler``'s interface and state dict, with overflow shared over ranks and no host sync.

    With a ``ShardedAdamW``, ``unscale_`` divides gradients that are readable through ``.grad``, and hands a
    device scalar to the update for those that are sharded; ``step`` skips on the device, on every rank, where
    any rank found a non-finite gradient. Other optimizers are handled as torch handles them.

    Args:
        device: where the scale lives; None: the first scaled tensor's device.
        The others are torch's.
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        super().__init__(device or "cpu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._follow_outputs = device is None

    def scale(self, outputs: Any) -> Any:
        if self._follow_outputs and isinstance(outputs, Tensor):
            self._device, self._follow_outputs = outputs.device.type, False
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if not self._enabled or not _is_sharded(optimizer):
            return super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() was called on this optimizer already since the last update()")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is called after step(); call update() between")
        optimizer.unscale_gradients(self._inverse_scale())
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """``optimizer.step()``, with gradients unscaled if nobody did, skipped on the device if any is not finite."""
        if not self._enabled or not _is_sharded(optimizer):
            return super().step(optimizer, *args, **kwargs)
        if args or kwargs:
            raise RuntimeError("a closure cannot be used with a GradScaler: it would run before gradients are checked")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        inverse = self._inverse_scale() if state["stage"] is OptState.READY else None
        result = optimizer.step_scaled(inverse)
        state["found_inf_per_device"] = {optimizer.device: optimizer.found_inf_of_step()}
        state["stage"] = OptState.STEPPED
        return result

    def _inverse_scale(self) -> Tensor:
        """[1] fp32: 1 / scale, divided in float64."""
        scale, _ = self._check_scale_growth_tracker("unscale_")
        return scale.double().reciprocal().float().reshape(1)
