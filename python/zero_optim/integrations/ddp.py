"""Lets a loop that was written around DDP stay: ``model.module``, ``model.no_sync()``,
``model.require_backward_grad_sync``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import ZeroOptimError
from ..optimizer import optimizers_of
from .clients import without_sync


class DistributedDataParallel(nn.Module):
    """Looks like torch's, and does nothing: ``ShardedOptimizer`` averages the gradients of ``module``.

    To be made before the optimizer or after it. The keys of ``state_dict()`` begin with ``module.``, as those of
    torch's do, and the names of parameters too; ``model.module`` has both without it. Buffers are not sent: see
    ``zero_optim.sync_buffers``.

    Args:
        module: the model, where it is to compute.
        device_ids, output_device, find_unused_parameters, gradient_as_bucket_view, static_graph: torch's; without
            effect. What torch's others are for is said to the optimizer: ``process_group``, ``bucket_cap_mb``.
        broadcast_buffers: False, which is not torch's default.

    Raises, in a forward that is to be trained, ZeroOptimError where no ``ShardedOptimizer`` has the parameters, on
    several ranks: each would train alone.
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
            self._check_averaged()
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Collective. Backwards within it add up on each rank: ``no_sync`` of every optimizer of the model."""
        with without_sync(optimizers_of(self.module)):
            yield

    @property
    def require_backward_grad_sync(self) -> bool:
        """True if the next backward reduces. Assigning False is entering ``no_sync()``, assigning True leaving it."""
        return self._reduces

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._reduces and not value:
            self._local.enter_context(self.no_sync())
        elif value:
            self._local.close()
        self._reduces = bool(value)

    def _check_averaged(self) -> None:
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        if several and trained and not optimizers_of(self.module):
            raise ZeroOptimError(
                "no ShardedAdamW has the parameters of this model, so nobody would average its gradients: make the "
                "optimizer before the first forward, or use torch's DistributedDataParallel with torch's optimizer"
            )
        self._averaged = True
