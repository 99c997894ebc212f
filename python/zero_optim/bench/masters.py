"""fp32 masters beside a 16-bit model, as in the AMP recipe: gradients are widened, updated masters are cast back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Masters:
    """fp32 copies of parameters and of their gradients. fp32 parameters are their own masters: nothing is copied.

    Attributes:
        masters: the tensors that an optimizer steps, in the order of ``params``; each has its ``.grad``.
    """

    def __init__(self, params: Iterable[Tensor]) -> None:
        self.params: list[Tensor] = list(params)
        self.separate = any(parameter.dtype != torch.float32 for parameter in self.params)
        self.masters: list[Tensor] = self.params
        self._grads: list[Tensor] = []
        if self.separate:
            self.masters = [nn.Parameter(parameter.detach().float()) for parameter in self.params]
            self._grads = [torch.empty_like(master) for master in self.masters]
            for master, grad in zip(self.masters, self._grads, strict=True):
                master.grad = grad

    def take_gradients(self) -> None:
        if self.separate:
            torch._foreach_copy_(self._grads, [p.grad for p in self.params if p.grad is not None])

    @torch.no_grad()
    def give_back(self) -> None:
        if self.separate:
            torch._foreach_copy_(self.params, self.masters)
