"""What the sharded optimizer must compute, written out in plain torch on one process, with full tensors.

Formula source: AdamW (Loshchilov and Hutter, 2019), in the operation order of the bit contract: every fp32 operation is
rounded on its own, every coefficient is made in float64 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_kernels import ROW, codecs

FP32_EPS = 2.0**-23


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of one parameter, named and defaulted as in ``torch.optim.AdamW``."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    decoupled: bool = True


def _f32(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64).float()


def sqrt_rounded(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root: torch's own of fp32 is not, on CPU."""
    return x.double().sqrt().float()


class MasterAdamW:
    """AdamW with masters over parameters of any floating dtype, each with a step count of its own.

    ``params`` holds the parameters (their own dtype), ``exp_avg`` and ``exp_avg_sq`` the state (fp32), ``steps`` the
    counts. The constructor copies what it is given. ``split``: the master of a bf16 parameter is that parameter and
    ``low``, so an edit of ``params`` holds; else it is fp32, and an edit must set ``wide``, too.
    """

    def __init__(
        self, params: Sequence[Tensor], hypers: Hyper | Sequence[Hyper] | None = None, *, split: bool = True
    ) -> None:
        hypers = Hyper() if hypers is None else hypers
        self.hypers = [hypers] * len(params) if isinstance(hypers, Hyper) else list(hypers)
        self.params = [p.detach().clone() for p in params]
        self.split = split
        self.wide = [p.float().clone() for p in self.params]
        self.low = [torch.zeros(p.shape, dtype=torch.int32) for p in self.params]
        self.exp_avg = [torch.zeros_like(p) for p in self.wide]
        self.exp_avg_sq = [torch.zeros_like(p) for p in self.wide]
        self.steps = [0] * len(params)

    def master(self, index: int) -> Tensor:
        """The fp32 master of a parameter."""
        param = self.params[index]
        if self.split and param.dtype == torch.bfloat16:
            return joined(param, self.low[index])
        return self.wide[index]

    def step(self, grads: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """One update by the averaged gradients times ``scale``. A parameter whose gradient is None is left alone."""
        for index, grad in enumerate(grads):
            if grad is not None:
                self.steps[index] += 1
                self._update(index, grad.float() * _f32(scale))

    def _update(self, index: int, g: Tensor) -> None:
        hyper, p, (beta1, beta2) = self.hypers[index], self.master(index), self.hypers[index].betas
        count = self.steps[index]
        if hyper.decoupled:
            p = p * _f32(1 - hyper.lr * hyper.weight_decay)
        elif hyper.weight_decay:
            g = g + _f32(hyper.weight_decay) * p
        m = self.exp_avg[index] * _f32(beta1) + g * _f32(1 - beta1)
        v = self.exp_avg_sq[index] * _f32(beta2) + (g * _f32(1 - beta2)) * g
        denominator = sqrt_rounded(v) / _f32(math.sqrt(1 - beta2**count)) + _f32(hyper.eps)
        p = p - _f32(hyper.lr / (1 - beta1**count)) * (m / denominator)
        self.wide[index], self.exp_avg[index], self.exp_avg_sq[index] = p, m, v
        self.params[index] = p.to(self.params[index].dtype)
        self.low[index] = low_of(p)


def low_of(master: Tensor) -> Tensor:
    """int32: the bits of a master less those of its bf16 rounding; of a tie, 32768 away, 32767 are kept."""
    return (master.view(torch.int32) - master.bfloat16().float().view(torch.int32)).clamp(-32767, 32767)


def joined(param: Tensor, low: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter and what is low of it. An inf or NaN, and a 0 that would change its sign,
    is itself."""
    high = param.float()
    bits = (high.view(torch.int32) + low).view(torch.float32)
    return torch.where(high.isfinite() & ~bits.isnan(), bits, high)


def pack_rounded(grad: Tensor, world_size: int, reduce_dtype: torch.dtype | None = None) -> Tensor:
    """One rank's contribution to the average: ``cast(float(g) * (1/N))``, the factor rounded to fp32 once."""
    return (grad.float() * _f32(1 / world_size)).to(reduce_dtype or grad.dtype)


def average(grads: Sequence[Tensor | None], reduce_dtype: torch.dtype | None = None) -> Tensor | None:
    """The averaged gradient of one parameter from all ranks' local ones, in the reduce dtype.

    Each contribution is rounded by the pack, the sum runs in rank order in fp32 and is rounded once. A rank without a
    gradient contributes zeros; None when no rank has one.
    """
    present = [g for g in grads if g is not None]
    if not present:
        return None
    dtype = reduce_dtype or present[0].dtype
    total = torch.zeros(present[0].shape)
    for grad in grads:
        if grad is not None:
            total = total + pack_rounded(grad, len(grads), dtype).float()
    return total.to(dtype)


def averages(
    per_rank: Sequence[Sequence[Tensor | None]], reduce_dtype: torch.dtype | None = None
) -> list[Tensor | None]:
    """:func:`average` of every parameter; ``per_rank[rank][index]`` are the local gradients."""
    return [average(grads, reduce_dtype) for grads in zip(*per_rank, strict=True)]


def accumulate(total: Sequence[Tensor | None] | None, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``total + grads`` element by element, rounded in the gradients' own dtype as autograd and the shards add."""
    if total is None:
        return [None if g is None else g.clone() for g in grads]
    return [b if a is None else a if b is None else a + b for a, b in zip(total, grads, strict=True)]


def rounded_by_noise(values: Tensor, parameter: int, step: int, state: int) -> Tensor:
    """fp32 ``values`` of a whole contiguous parameter as an update of that number stores them in bf16, widened.

    ``parameter``: its index. ``state``: the number of the state among the rule's; -1, -2, ... of averages.
    """
    rows = -(-values.numel() // ROW)
    padded = torch.nn.functional.pad(values.reshape(-1), (0, rows * ROW - values.numel())).view(rows, ROW)
    keys = codecs.row_keys(parameter, 0, rows).unsqueeze(1)
    noise = codecs.noise_of(keys, torch.full((rows, 1), float(step)), state)
    (stored,) = codecs.encode_bf16_stochastic(padded, noise)
    return stored.float().view(-1)[: values.numel()].view(values.shape)


def adamw_bound(param: Tensor, lr: float, steps: int) -> Tensor:
    """How far fp32 parameters may lie from ``torch.optim.AdamW``'s after ``steps`` updates by the same gradients.

    Both round each operation, in different orders (torch fuses ``lerp`` and ``addcdiv``). A step's update is at most a
    few times ``lr`` and is formed in about ten operations, so 16 eps * lr a step; adding it to the parameter and
    decaying it rounds two more times, each by at most half an ulp of the parameter, on both sides.
    """
    return steps * FP32_EPS * (2 * param.abs() + 16 * lr)


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. (2023), every operation rounded on its own."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                lr, (beta1, beta2), decay = group["lr"], group["betas"], group["weight_decay"]
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                direction = (m * beta1 + p.grad * (1 - beta1)).sign()
                p.copy_(p * (1 - lr * decay) - lr * direction)
                m.copy_(m * beta2 + p.grad * (1 - beta2))
