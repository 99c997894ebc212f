"""A mixture of experts over the ranks of a mesh ("edp", "ep"), and the same in one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS, TOKENS = 12, 20, 4, 8
HYPER = {"lr": 1e-2, "weight_decay": 0.1}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Stacked(nn.Module):
    """All experts in two parameters, as grouped matrix products want them."""

    def __init__(self, count: int = EXPERTS) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / 4)

    def forward(self, number: int, x: Tensor) -> Tensor:
        up, down = (p.to_local() if hasattr(p, "to_local") else p for p in (self.up, self.down))
        return torch.tanh(x @ up[number]) @ down[number]


class _AllTokens(torch.autograd.Function):
    """[ranks * tokens, width] those of all ranks of a group; a gradient goes back to whose token it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.tokens = group, len(x)
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad[ctx.group.rank() * ctx.tokens :][: ctx.tokens], None


class _OwnTokens(torch.autograd.Function):
    """[tokens, width] of this rank, summed over what the experts of all ranks of a group have made of them."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Moe(nn.Module):
    """Experts between two dense layers. Each token goes to one expert, which is told by hand."""

    def __init__(self, *, stacked: bool = False) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts: Any = Stacked() if stacked else nn.ModuleList(Mlp() for _ in range(EXPERTS))
        self.own = range(EXPERTS)
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: Tensor, route: Sequence[int]) -> Tensor:
        """``route``: the expert of each token, of all ranks of the expert-parallel group one after another."""
        h = torch.tanh(self.before(x))
        tokens = h if self.group is None else _AllTokens.apply(h, self.group)
        out = tokens * 0
        for number, expert in enumerate(self.own):
            chosen = [token for token, wanted in enumerate(route) if wanted == expert]
            if chosen:  # else its parameters have no gradient
                out = out.index_add(0, torch.tensor(chosen, device=x.device), self._expert(number, tokens[chosen]))
        return self.after(h + (out if self.group is None else _OwnTokens.apply(out, self.group)))

    def _expert(self, number: int, x: Tensor) -> Tensor:
        return self.experts(number, x) if isinstance(self.experts, Stacked) else self.experts[number](x)


def make_mesh(order: Sequence[str] = ("edp", "ep"), device: str = "cpu") -> dist.DeviceMesh:
    """Collective. 2 x 2 ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (2, 2), mesh_dim_names=tuple(order))


def spread(model: Moe, mesh: dist.DeviceMesh) -> Moe:
    """Keep this rank's experts: as ``DTensor``s where they are stacked, else as plain parameters."""
    each = EXPERTS // mesh["ep"].size()
    rank = mesh.get_local_rank("ep")
    model.own, model.group = range(rank * each, (rank + 1) * each), mesh.get_group("ep")
    if isinstance(model.experts, Stacked):
        from torch.distributed.tensor import Shard, distribute_tensor

        for name, parameter in list(model.experts.named_parameters()):
            cut = nn.Parameter(distribute_tensor(parameter.detach(), mesh["ep"], [Shard(0)]))
            setattr(model.experts, name, cut)
    else:
        model.experts = nn.ModuleList(model.experts[number] for number in model.own)
    return model


@dataclass
class Way:
    """A way to train."""

    stage: int = 2
    stacked: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 3
    starved: bool = False
    """Whether some experts get no tokens."""
    left_out: int | None = None
    """The step in which no expert gets any."""

    def route(self, rank: int, step: int) -> list[int]:
        """The expert of each token of a rank, ``rank`` counted replica by replica."""
        if step == self.left_out:
            return [-1] * TOKENS
        allowed = list(range(EXPERTS))
        if self.starved and step == 0:
            allowed = [0, 1, 3]  # 2 on no rank, and 0, which has the same local name, on all
        if self.starved and step == 1:
            allowed = [0, 2] if rank < 2 else [0, 1, 2]  # 1 on one replica alone, 3 on none
        if self.starved and step == 2:
            allowed = [1]  # nothing at all for the ranks with 2 and 3
        return [allowed[(token + rank + step) % len(allowed)] for token in range(TOKENS)]

    def routes(self, mesh: dist.DeviceMesh, step: int) -> list[int]:
        """The expert of each token of the ranks that have all experts among them, this one with them."""
        replica = mesh.get_local_rank("edp")
        return [expert for part in (0, 1) for expert in self.route(2 * replica + part, step)]

    def loss(self, model: Moe, rank: int, step: int, micro: int, routes: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed((rank * 100 + step) * 10 + micro)
        x, y = torch.randn(2, TOKENS, WIDTH, generator=generator).to(next(model.parameters()).device)
        return nn.functional.mse_loss(model(x.to(self.dtype), routes).float(), y)


def make_model(way: Way, mesh: dist.DeviceMesh | None = None, device: str | None = None) -> Moe:
    """``mesh``: over which experts are spread."""
    torch.manual_seed(0)
    model = Moe(stacked=way.stacked).to(way.dtype)
    if device is not None:
        model.to(device)
    return model if mesh is None else spread(model, mesh)


def groups_of(model: Moe, mesh: dist.DeviceMesh) -> list[dict[str, Any]]:
    """Parameter groups with names: dense ones, and experts."""
    dense = [(name, p) for name, p in model.named_parameters() if "experts" not in name]
    experts = [(name, p) for name, p in model.named_parameters() if "experts" in name]
    return [{"params": dense}, {"params": experts, "mesh": mesh["edp"], "grad_divisor": mesh.size()}]
