"""A stand-in for DDP, for loops that use ``module``, ``no_sync()`` and ``require_backward_grad_sync``."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ZeroOptimError
from ..optimizer import optimizers_of
from .clients import entered


class DistributedDataParallel(nn.Module):
    """A wrapper like torch's that reduces nothing: ``ShardedOptimizer`` averages the gradients of ``module``.

    Make it before the optimizer or after it. As in torch's, the keys of ``state_dict()`` and the names of parameters
    begin with ``module.``; those of ``model.module`` do not. Buffers are not broadcast: see
    ``zero_optim.sync_buffers``.

    Args:
        module: the model, on the device where it computes.
        device_ids, output_device, find_unused_parameters, gradient_as_bucket_view, static_graph: torch's; without
            effect. Give torch's other arguments to the optimizer: ``process_group``, ``bucket_cap_mb``.
        broadcast_buffers: False, which is not torch's default.

    On several ranks a training forward raises ZeroOptimError where no ``ShardedOptimizer`` has the parameters: each
    rank would train alone.
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        *,
        broadcast_buffers: bool = False,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        super().__init__()
        if broadcast_buffers:
            raise ValueError(
                "broadcast_buffers must be False: call zero_optim.sync_buffers(model) where ranks are to have the same"
            )
        self.module = module
        self._averaged = False  # whether an optimizer was found
        self._reduces = True
        self._local = ExitStack()  # holds the block of no_sync, while ``_reduces`` is False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self._averaged and self.training and torch.is_grad_enabled():
            several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
            trained = any(parameter.requires_grad for parameter in self.module.parameters())
            if several and trained and not optimizers_of(self.module):
                raise ZeroOptimError(
                    "no ShardedAdamW has the parameters of this model, so nobody would average its gradients: make the "
                    "optimizer before the first forward, or use torch's DistributedDataParallel with torch's optimizer"
                )
            self._averaged = True
        return self.module(*args, **kwargs)

    def no_sync(self) -> AbstractContextManager[None]:
        """Collective. Let gradients add up on each rank, unreduced: ``no_sync`` of every optimizer of the model."""
        return entered(optimizer.no_sync() for optimizer in optimizers_of(self.module))

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the next backward reduces. Assigning False enters ``no_sync()``, assigning True leaves it."""
        return self._reduces

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._reduces and not value:
            self._local.enter_context(self.no_sync())
        elif value:
            self._local.close()
        self._reduces = bool(value)
