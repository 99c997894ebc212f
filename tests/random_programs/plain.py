"""The public face in plain torch: what a program has to compute.

Every rank holds everything. A gradient is the mean over all ranks of what each has in ``.grad``, and absent where no
rank has one. 16-bit parameters are roundings of fp32 masters, which torch's own optimizers update.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from oracle import PaperLion
from torch import Tensor, nn


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def own_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def summed(tensor: Tensor) -> Tensor:
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


# -- rules -------------------------------------------------------------------------------------------------------------


class Muon(torch.optim.Muon):
    """torch's, over the matrices of parameters: views of them, each with a momentum of its own."""

    def __init__(self, params: Sequence[Tensor], view: Any = None, ns_gram: bool = False, **options: Any) -> None:
        self.wholes = list(params)
        self.view = next(iter(view.items())) if view else None
        self.matrices = {p: [nn.Parameter(block) for block in self.blocks(p.data)] for p in self.wholes}
        every = [matrix for matrices in self.matrices.values() for matrix in matrices]
        super().__init__(every, **options)

    def blocks(self, whole: Tensor) -> list[Tensor]:
        """Of four dimensions it is a convolution, [out, the rest]; of three a stack."""
        matrices = [*whole.unbind()] if whole.dim() == 3 else [whole.reshape(len(whole), -1)]
        if self.view is None:
            return matrices
        dim = ("rows", "columns").index(self.view[0])
        return [block for matrix in matrices for block in matrix.chunk(self.view[1], dim)]

    def step(self) -> None:  # type: ignore[override]
        for p, matrices in self.matrices.items():
            grads = [None] * len(matrices) if p.grad is None else self.blocks(p.grad)
            for matrix, grad in zip(matrices, grads, strict=True):
                matrix.grad = grad
        super().step()

    def state_of(self, p: Tensor) -> dict[str, Tensor]:
        whole = torch.zeros_like(p)
        for block, matrix in zip(self.blocks(whole), self.matrices[p], strict=True):
            block.copy_(self.state[matrix]["momentum_buffer"])
        return {"momentum_buffer": whole}


rules = SimpleNamespace(  # of options each makes what makes an optimizer
    AdamW=partial(partial, torch.optim.AdamW, foreach=False),
    SGD=partial(partial, torch.optim.SGD, foreach=False),
    Lion=partial(partial, PaperLion, betas=(0.9, 0.99)),
    Muon=partial(partial, Muon),
)


# -- the optimizer -----------------------------------------------------------------------------------------------------


class ShardedOptimizer(torch.optim.Optimizer):
    """Its groups have ``lr`` and ``weight_decay``. Of the options that are not here none changes a value."""

    def __init__(
        self,
        params: Any,
        rule: Callable[..., torch.optim.Optimizer],
        max_grad_norm: float | None = None,
        ema_decay: float | None = None,
        **_: Any,
    ) -> None:
        self.rule, self.max_grad_norm, self.ema_decay = rule, max_grad_norm, ema_decay
        self.inner: list[torch.optim.Optimizer] = []
        self.masters: dict[Tensor, nn.Parameter] = {}
        self.updates: dict[Tensor, int] = {}
        self.averages: dict[Tensor, Tensor] = {}
        self.clips: dict[Tensor, Tensor] = {}
        self.clipped = False  # clip_grad_norm_ was called, and nothing came since
        self.touched = False  # this rank has a new gradient since, or was in a no_sync block
        self.scale, self.unscaled, self.skipped = 1.0, False, False
        self.tokens: float | None = None  # of this rank, where it has counted some for this step
        self.empty = False  # no rank has a token
        super().__init__(params, {"grad_divisor": world_size()})

    def add_param_group(self, group: dict[str, Any]) -> None:
        super().add_param_group(group)
        group = self.param_groups[-1]
        for p in group["params"]:
            self.masters[p] = nn.Parameter(p.detach().float().clone())
            trained = p.requires_grad
            p.requires_grad_(True).register_post_accumulate_grad_hook(self._touch)  # it needs one that is trained
            p.requires_grad_(trained)
        rule = group.get("rule") or self.rule
        own = {"view": group["view"]} if "view" in group else {}
        masters = [self.masters[p] for p in group["params"]]
        self.inner.append(rule(masters, lr=group["lr"], weight_decay=group["weight_decay"], **own))

    def count(self, tokens: Any) -> None:
        self.tokens = (self.tokens or 0.0) + float(tokens)

    def _touch(self, _: Tensor) -> None:
        self.touched = True

    def listed(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # Gradients

    def means(self) -> dict[Tensor, Tensor]:
        """Collective. The averaged gradients of the trained parameters, clipped and unscaled."""
        params = [p for p in self.listed() if p.requires_grad]
        flags = [float(p.grad is not None) for p in params]
        own = [torch.zeros(p.numel()) if p.grad is None else p.grad.float().reshape(-1) for p in params]
        flat = summed(torch.cat([torch.tensor([float(self.touched), self.tokens or 0.0, *flags]), *own]))
        touched, tokens, *present = flat[: 2 + len(params)].tolist()
        self.empty = self.tokens is not None and tokens == 0
        divisor = tokens if self.tokens is not None and tokens else world_size()
        if touched:
            self.clips, self.clipped, self.touched = {}, False, False
        parts = flat[2 + len(params) :].split([p.numel() for p in params])
        experts = {p: world_size() / group["grad_divisor"] for group in self.param_groups for p in group["params"]}
        return {
            p: part.view(p.shape) / divisor * experts[p] * self.clips.get(p, torch.ones(()))
            for p, part, has in zip(params, parts, present, strict=True)
            if has
        }

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, params: Any = None) -> Tensor:
        grads = self.means()
        self.clipped = True
        return self._clip(grads, max_norm, norm_type, params, self.scale if self.unscaled else 1.0)

    def _clip(self, grads: dict[Tensor, Tensor], most: float, norm_type: float, params: Any, scale: float) -> Tensor:
        chosen = [p for p in grads if params is None or any(p is one for one in params)]
        norms = [torch.linalg.vector_norm(grads[p] / scale, norm_type) for p in chosen if p.numel()]
        norm = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros(())
        coefficient = (most / (norm + 1e-6)).clamp(max=1.0)
        for p in chosen:
            self.clips[p] = self.clips.get(p, torch.ones(())) * coefficient
            grads[p] = grads[p] * coefficient
        return norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.clips, self.clipped, self.unscaled, self.touched = {}, False, False, True
        self.tokens = None

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.touched = True
        yield
        self.touched = True

    # The step

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grads = self.means()
        if self.max_grad_norm is not None and not self.clipped:
            self._clip(grads, self.max_grad_norm, 2.0, None, self.scale)
        self.skipped = not all(bool(grad.isfinite().all()) for grad in grads.values())
        if not self.skipped and not self.empty:
            self._update({p: grad / self.scale for p, grad in grads.items()})
        self.clips, self.clipped, self.unscaled, self.tokens = {}, False, False, None
        return loss

    def _update(self, grads: dict[Tensor, Tensor]) -> None:
        for p, master in self.masters.items():
            master.copy_(settled(master, p))
            master.grad = grads.get(p)
        for inner, group in zip(self.inner, self.param_groups, strict=True):
            inner.param_groups[0].update({name: group[name] for name in ("lr", "weight_decay")})
            inner.step()
        for p in grads:
            master = self.masters[p].detach()
            p.copy_(master)
            self.updates[p] = self.updates.get(p, 0) + 1
            if self.ema_decay is not None:
                before = self.averages.get(p, master)
                self.averages[p] = before + (1 - self.ema_decay) * (master - before)

    # State

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {
            "inner": [copy.deepcopy(inner.state_dict()) for inner in self.inner],
            "options": [{k: v for k, v in group.items() if k != "params"} for group in self.param_groups],
            "masters": [self.masters[p].detach().clone() for p in self.listed()],
            "updates": [self.updates.get(p) for p in self.listed()],
            "averages": [self.averages[p].clone() if p in self.averages else None for p in self.listed()],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        for inner, old in zip(self.inner, state["inner"], strict=True):
            inner.load_state_dict(copy.deepcopy(old))
        for group, old in zip(self.param_groups, state["options"], strict=True):
            group.update({name: old[name] for name in ("lr", "weight_decay")})
        for p, master, count, average in zip(
            self.listed(), state["masters"], state["updates"], state["averages"], strict=True
        ):
            self.masters[p].copy_(settled(master, p))
            self.updates.update({} if count is None else {p: count})
            self.averages.update({} if average is None else {p: average.clone()})

    @torch.no_grad()
    def reset_state(self, keep: str | None, keep_ema: bool) -> None:
        for state in (state for inner in self.inner for state in inner.state.values()):
            for value in (value for value in state.values() if isinstance(value, Tensor)):
                value.zero_()
        for p, master in self.masters.items():
            master.copy_(settled(master, p) if keep else p.detach())
            if p in self.averages and not keep_ema:
                self.averages[p] = master.detach().clone()
        self.updates = dict.fromkeys(self.updates, 0)

    def full_state(self) -> dict[int, dict[str, Any]]:
        """Of each parameter that was updated, by number over all groups."""
        owners = [inner for inner, group in zip(self.inner, self.param_groups, strict=True) for _ in group["params"]]
        found = {}
        for number, (p, owner) in enumerate(zip(self.listed(), owners, strict=True)):
            if p in self.updates:
                master = self.masters[p]
                own = owner.state_of(master) if isinstance(owner, Muon) else owner.state.get(master, {})
                kept = {name: value.detach().clone() for name, value in own.items() if value is not None}
                found[number] = {**kept, "step": self.updates[p]}
        return found

    def ema_state_dict(self, rank: int | None = None) -> dict[int, Tensor]:
        return {
            number: self.averages[p] if p in self.updates else settled(self.masters[p].detach(), p)
            for number, p in enumerate(self.listed())
            if p.requires_grad
        }

    @contextlib.contextmanager
    def swap_to_ema(self) -> Iterator[None]:
        before = {p: p.detach().clone() for p in self.updates}
        with torch.no_grad():
            for p in before:
                p.copy_(self.averages[p])
            yield
            for p, value in before.items():
                p.copy_(value)

    def close(self) -> None:
        self.zero_grad()

    # What changes no value

    def observe(self) -> None: ...
    def stats(self) -> dict[str, Any]:
        return {}


def full_state_dict(opt: ShardedOptimizer, rank: int | None = 0) -> dict[str, Any]:
    """The ``state`` that this rank sees, and what any rank can load."""
    return {"state": opt.full_state() if rank in (None, own_rank()) else {}, "all": opt.state_dict()}


def load_full_state_dict(opt: ShardedOptimizer, state: dict[str, Any]) -> None:
    opt.load_state_dict(state["all"])


def settled(master: Tensor, p: Tensor) -> Tensor:
    """The master, but where the parameter is not its rounding: that was edited."""
    return torch.where(master.to(p.dtype) == p.detach(), master, p.detach().float())


class GradScaler:
    """Halves its scale at an overflow, and doubles it after ``growth_interval`` steps without one."""

    def __init__(self, init_scale: float, growth_interval: int) -> None:
        self.value, self.interval, self.good, self.found = init_scale, growth_interval, 0, False

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.value

    def unscale_(self, opt: ShardedOptimizer) -> None:
        opt.scale, opt.unscaled = self.value, True
        self.found |= not all(bool(grad.isfinite().all()) for grad in opt.means().values())

    def step(self, opt: ShardedOptimizer) -> None:
        opt.scale = self.value
        opt.step()
        opt.scale = 1.0
        self.found |= opt.skipped

    def update(self) -> None:
        self.good = 0 if self.found else self.good + 1
        if self.found or self.good == self.interval:
            self.value, self.good = self.value * (0.5 if self.found else 2.0), 0
        self.found = False

    def get_scale(self) -> float:
        return self.value


# -- models ------------------------------------------------------------------------------------------------------------


def shard_module(module: nn.Module, **_: Any) -> nn.Module:
    for p in module.parameters():
        if world_size() > 1 and not hasattr(p, "expert"):
            dist.broadcast(p.data, 0)
    return module


@contextlib.contextmanager
def gather_parameters(module: nn.Module, writeback: bool = False) -> Iterator[None]:
    """Rank 0's writes hold, and none where something raises."""
    before = [p.detach().clone() for p in module.parameters()]
    kept = False
    try:
        yield
        kept = True
    finally:
        for p, value in zip(module.parameters(), before, strict=True):
            if writeback and not kept:
                p.data.copy_(value)
    if writeback:
        shard_module(module)


def full_model_state_dict(module: nn.Module, rank: int | None = 0, trained_only: bool = False) -> dict[str, Any]:
    if rank not in (None, own_rank()):
        return {}
    left_out = {name for name, p in module.named_parameters(remove_duplicate=False) if not p.requires_grad}
    left_out |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    state = module.state_dict().items()
    return {name: tensor.clone() for name, tensor in state if not (trained_only and name in left_out)}


def register_forward_method(module: nn.Module, name: str) -> None: ...
