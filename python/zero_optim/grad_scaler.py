"""Loss scaling for fp16: a ``torch.amp.GradScaler`` for sharded gradients."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler as TorchGradScaler
from torch.amp.grad_scaler import OptState

from zero_kernels import is_capturing

from .comm.streams import HostCopy
from .engine import Engine
from .optimizer import ShardedOptimizer


def _sharded_of(optimizer: object) -> ShardedOptimizer | None:
    """Find the optimizer, of which ``optimizer`` may be a client's wrapper. None: torch handles it."""
    engine = getattr(optimizer, "engine", None)
    if not isinstance(engine, Engine):
        return None
    opt = engine.optimizer()
    assert isinstance(opt, ShardedOptimizer)
    return opt


class GradScaler(TorchGradScaler):
    """``torch.amp.GradScaler``'s interface and state dict, with overflow combined over ranks and no host sync.

    With a ``ShardedOptimizer``, ``unscale_`` divides gradients that are readable through ``.grad``, and hands a
    device scalar to the update for those that are sharded; ``step`` skips on the device, on every rank, where
    any rank found a non-finite gradient. Other optimizers are handled as torch handles them. If the scale falls below
    1, a warning names the first gradient that was not finite; nothing is raised.

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
        self._sharded: dict[int, weakref.ref[Any]] = {}  # optimizers met, by id
        self._host_scale: HostCopy | None = None
        self._last_scale = init_scale  # as the host has last seen it

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_sharded": {}, "_host_scale": None}

    def scale(self, outputs: Any) -> Any:
        if self._follow_outputs and isinstance(outputs, Tensor):
            self._device, self._follow_outputs = outputs.device.type, False
        return super().scale(outputs)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        opt = _sharded_of(optimizer)
        if not self._enabled or opt is None:
            return super().unscale_(optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() was called on this optimizer already since the last update()")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is called after step(); call update() between")
        self._sharded[id(optimizer)] = weakref.ref(optimizer)
        opt.check_usable()
        with torch.inference_mode(False), torch.no_grad():
            opt.engine.unscale(self._inverse_scale(opt.engine))
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Call ``optimizer.step()``; unscale if nobody has. The device skips the step if a gradient is not finite."""
        opt = _sharded_of(optimizer)
        if not self._enabled or opt is None:
            return super().step(optimizer, *args, **kwargs)
        if any(argument is not None for argument in (*args, *kwargs.values())):  # accelerate gives a closure of None
            raise RuntimeError("a closure cannot be used with a GradScaler: it would run before gradients are checked")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        self._sharded[id(optimizer)] = weakref.ref(optimizer)
        engine = opt.engine
        if state["stage"] is OptState.READY:  # else ``unscale_`` has set it, or has divided the gradients
            engine.clip.inverse_scale = engine.clip.inverse_loss_scale = self._inverse_scale(engine)
        engine.clip.scaled = True
        result = opt.step()
        state["found_inf_per_device"] = {engine.sharding.device: engine.exchange.found_inf.clone()}
        state["stage"] = OptState.STEPPED
        return result

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._enabled:
            for key, state in self._per_optimizer_states.items():
                reference = self._sharded.get(key)
                optimizer = reference() if reference is not None else None
                if optimizer is not None and state["stage"] is OptState.UNSCALED:
                    engine = optimizer.engine  # no step was made, whose exchange would show an overflow
                    with torch.inference_mode(False), torch.no_grad():
                        engine.finish_and_exchange(None)
                        overflow = (engine.exchange.totals[1:] > 0).float()
                    state["found_inf_per_device"] = {engine.sharding.device: overflow}
        super().update(new_scale)
        if self._enabled:
            self._watch_scale()

    def _watch_scale(self) -> None:
        """Warn when the scale has fallen below 1, and name the first gradient of each optimizer that was not finite."""
        scale = self._scale
        if scale is None or is_capturing(scale.device):
            return
        if self._host_scale is None or self._host_scale.source is not scale:
            self._host_scale = HostCopy(scale)
        # Of a GPU the host reads the scale that an earlier update has sent, and never waits for one.
        if self._host_scale.immediate:
            self._host_scale.send()
        seen = self._host_scale.read(wait=False)
        self._host_scale.send()
        if seen is None:
            return
        before, self._last_scale = self._last_scale, seen[0]
        if seen[0] < 1.0 <= before:
            firsts = [opt.engine.first_non_finite() for of in self._sharded.values() if (opt := of()) is not None]
            named = ["{parameter} on rank {rank} in step {step}".format(**first) for first in firsts if first]
            warnings.warn(
                f"the loss scale fell to {seen[0]:g}: gradients are not finite whatever the scale. The first was that "
                f"of {', '.join(named) or 'a parameter of another optimizer'}",
                stacklevel=3,
            )

    def _inverse_scale(self, engine: Engine) -> Tensor:
        """[1] fp32: 1 / scale, divided in float64."""
        # A rank without data has scaled no loss yet, and of a pipeline the last stage alone scales one. All ranks begin
        # with the same scale, and change it alike.
        if self._scale is None and (engine.pipeline is not None or not engine.reducer.has_own_gradients()):
            self._lazy_init_scale_growth_tracker(engine.sharding.device)
        scale, _ = self._check_scale_growth_tracker("unscale_")
        return scale.double().reciprocal().float().reshape(1)
