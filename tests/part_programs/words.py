"""What the programs are made of: modules of many kinds, and the words that a program uses.

Every module maps [rows, H] to [rows, H], so that any of them may follow any other. ``call`` hides in what form a module
returns it. A program's text runs in three ways, which ``Words`` tells apart: on a sharded model, on the same model at
stage 2, and with ``torch.optim.AdamW`` on plain modules whose gradients are averaged by hand.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import zero_optim
from programs.world import Planned as Boom
from programs.world import boom as raise_in_backward
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

H, ROWS, WORDS_KNOWN = 12, 3, 12
EPS = 0.1  # beside it gradients are small, so that an update is about as large as its gradient


def on_this_rank(ranks: Any) -> bool:
    """``ranks`` are True, all of them; or the number of one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return ranks is True or (ranks is not None and ranks is not False and ranks % world() == rank)


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def boom(x: Tensor, ranks: Any = True) -> Tensor:
    """``x``; a backward that comes to it raises, on all ranks or on one."""
    return raise_in_backward(x) if on_this_rank(ranks) else x.clone()


@contextlib.contextmanager
def caught() -> Iterator[None]:
    with contextlib.suppress(Boom):
        yield


@dataclass
class Out:
    a: Tensor
    b: Tensor
    note: str = "beside"


def formed(form: str, y: Tensor) -> Any:
    """``y`` in the form in which a module returns it."""
    if form == "tensor":
        return y
    a, b = 0.5 * y, 0.25 * torch.tanh(y)
    forms = {"tuple": (a, b), "list": [a, {"deep": b}], "dict": {"a": a, "b": b, "n": 3}, "data": Out(a, b)}
    return forms[form]


def tensor(out: Any) -> Tensor:
    if isinstance(out, Tensor):
        return out
    if isinstance(out, Out):
        return out.a + out.b
    parts = out.values() if isinstance(out, dict) else out
    return sum(tensor(part) for part in parts if not isinstance(part, int))


def call(module: nn.Module, x: Tensor, ckpt: bool | None = None, **options: Any) -> Tensor:
    """``module(x)`` as a tensor, in a checkpoint if ``ckpt`` says of which kind: re-entrant or not."""
    if getattr(module, "form", "") == "inplace":
        x = x * 1
        module(x)
        return x
    if ckpt is None:
        return tensor(module(x, **options))
    return tensor(checkpoint(module, x, use_reentrant=ckpt))


class Lin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)
        self.bias = nn.Parameter(torch.randn(H) / 4)
        self.fail: Any = None
        self.boom: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fail:
            raise Boom
        y = F.linear(x, self.weight, self.bias)
        return torch.tanh(y if self.boom is None else boom(y, self.boom))

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.bias


class Scale(nn.Module):
    """A parameter and no modules."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randn(H) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    """``up`` and ``down``, and around them what the arguments ask for.

    Args:
        form: of what it returns; "inplace": it changes its argument and returns nothing.
        ckpt: ``up`` is in a checkpoint, re-entrant (True) or not.
        depth: how often it calls itself.
        aux: it leaves a loss in an attribute.
        turned: it calls ``down`` before ``up``, another order than that in which they are registered.
        unused: it does not call ``down``.
    """

    def __init__(
        self,
        form: str = "tensor",
        ckpt: bool | None = None,
        depth: int = 0,
        aux: bool = False,
        gain: bool = False,
        norm: bool = False,
        drop: bool = False,
        turned: bool = False,
        unused: bool = False,
        inner: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.form, self.ckpt, self.depth, self.leaves_aux = form, ckpt, depth, aux
        self.turned, self.unused = turned, unused
        self.norm = nn.LayerNorm(H) if norm else None
        self.up, self.inner, self.down = Lin(), inner, Lin()
        self.gain = nn.Parameter(torch.ones(H)) if gain else None
        self.drop = nn.Dropout(0.25) if drop else None
        self.register_buffer("calls", torch.zeros(()))
        self.far: list[nn.Module] = []  # modules of other units: in a list, they are not registered here
        self.aux: Tensor | None = None
        self.boom: Any = None

    def forward(self, x: Tensor, depth: int | None = None) -> Any:
        self.calls += 1
        depth = self.depth if depth is None else depth
        h = x.clone() if self.form == "inplace" else x
        h = h if self.norm is None else self.norm(h)
        first, last = (self.down, self.up) if self.turned else (self.up, self.down)
        h = call(first, h, self.ckpt if h.requires_grad or not self.ckpt else None)
        h = h if self.inner is None else call(self.inner, h)
        for module in self.far:
            h = call(module, h)
        h = h if self.boom is None else boom(h, self.boom)
        h = h if self.unused else last(h)
        h = h if self.gain is None else h * self.gain
        h = h if self.drop is None else self.drop(h)
        if depth:
            h = h * 0.5
            h = h + (call(self, h) if self.form == "inplace" else tensor(self(h, depth - 1))) * 0.5
        if self.leaves_aux:
            self.aux = (h.float() ** 2).mean()
        if self.form == "inplace":
            return x.add_(h)
        return formed(self.form, x + h)

    def half(self, x: Tensor) -> Tensor:
        """It reads a parameter of its own, if it has one: to be registered."""
        return self.up(x) * (1 if self.gain is None else self.gain)

    def both(self, x: Tensor) -> Tensor:
        """It only calls modules."""
        return self.down(self.up(x))


class Stack(nn.Module):
    """A container with a parameter of its own."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(H))
        self.inside = nn.ModuleList(blocks)

    def __getitem__(self, index: int) -> nn.Module:
        return self.inside[index]

    def __len__(self) -> int:
        return len(self.inside)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inside:
            x = call(block, x)
        return x + self.shift


class Model(nn.Module):
    """An embedding, blocks in a container, a head; and methods.

    Args:
        holds: the container, "list" or "stack".
        emb, head: whether they are there.
        ckpt: blocks are in checkpoints, re-entrant (True) or not; ``pairs``: two in one.
        own: a parameter of its own, which its forward reads.
    """

    def __init__(
        self,
        *blocks: nn.Module,
        holds: str = "list",
        emb: bool = False,
        head: bool = False,
        ckpt: bool | None = None,
        pairs: bool = False,
        own: bool = False,
        form: str = "tensor",
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS_KNOWN, H) if emb else None
        self.blocks = nn.ModuleList(blocks) if holds == "list" else Stack(*blocks)
        self.own = nn.Parameter(1 + torch.randn(H) / 8) if own else None
        self.head = Lin() if head else None
        self.form, self.ckpt, self.pairs = form, ckpt, pairs

    def embedded(self, x: Tensor) -> Tensor:
        if self.emb is None:
            return x
        return x + self.emb((x[:, 0].detach().float().abs() * 10).long() % WORDS_KNOWN)

    def forward(
        self, x: Tensor, skip: Sequence[int] = (), part: Sequence[int] = (), fail: Any = None, boom_at: Any = None
    ) -> Any:
        x = self.embedded(x)
        if isinstance(self.blocks, Stack) and not skip and not part and fail is None and boom_at is None:
            x = self.blocks(x)
        else:
            x = self._blocks(x, skip, part, fail, boom_at)
        x = x if self.own is None else x * self.own
        x = x if self.head is None else self.head(x)
        return formed(self.form, x)

    def _blocks(self, x: Tensor, skip: Sequence[int], part: Sequence[int], fail: Any, boom_at: Any) -> Tensor:
        size = 2 if self.pairs else 1
        numbers = [n for n in range(len(self.blocks)) if n not in skip]
        for start in range(0, len(numbers), size):
            chosen = numbers[start : start + size]
            if fail in chosen:
                raise Boom
            if boom_at is not None and boom_at[0] in chosen:
                x = boom(x, boom_at[1])
            if self.ckpt is None or (self.ckpt and not x.requires_grad):
                x = self._some(x, chosen, part)
            else:
                x = checkpoint(self._some, x, chosen, part, use_reentrant=self.ckpt)
        return x

    def _some(self, x: Tensor, numbers: Sequence[int], part: Sequence[int]) -> Tensor:
        for n in numbers:
            x = call(self.blocks[n].up if n in part else self.blocks[n], x)
        return x

    def encode(self, x: Tensor) -> Tensor:
        """It only calls modules."""
        x = self.embedded(x)
        for block in self.blocks if not isinstance(self.blocks, Stack) else self.blocks.inside:
            x = call(block, x)
        return x

    def score(self, x: Tensor) -> Tensor:
        """It reads a parameter of its own, if there is one: to be registered."""
        x = call(self, x)
        return x if self.own is None else x / (1 + self.own**2)

    def generate(self, x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = torch.cat([x[1:], call(self, x)[-1:]])
        return x


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module, own: bool = False) -> None:
        super().__init__()
        self.model = model
        self.own = nn.Parameter(1 + torch.randn(H) / 8) if own else None

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = call(self.model, x, **options)
        return x if self.own is None else x * self.own


class AveragedByHand(torch.optim.AdamW):
    """``torch.optim.AdamW`` on the mean of all ranks' gradients. A parameter without any is left out, as torch does."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.max_grad_norm = options.pop("max_grad_norm", None)
        self.clipped_to: float | None = None
        super().__init__(params, **options)

    def _every(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None
        own = [p.grad for p in self._every()]
        for p in self._every():
            p.grad = mean_over_ranks(p)
        bound = self.max_grad_norm if self.clipped_to is None else self.clipped_to
        if bound is not None:
            torch.nn.utils.clip_grad_norm_([p for p in self._every() if p.grad is not None], bound)
        self.clipped_to = None
        super().step()
        for p, grad in zip(self._every(), own, strict=True):
            p.grad = grad
        return loss

    def clip_grad_norm_(self, max_norm: float) -> None:
        self.clipped_to = max_norm

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def observe(self) -> None: ...

    def close(self) -> None:
        self.zero_grad()


def mean_over_ranks(p: nn.Parameter) -> Tensor | None:
    present = torch.tensor(float(p.grad is not None))
    total = torch.zeros_like(p) if p.grad is None else p.grad.clone()
    if world() > 1:
        dist.all_reduce(present)
        dist.all_reduce(total)
    return total / world() if present else None


@dataclass
class Words:
    """What a program's text calls, in one of the three ways: 3, 2, or 0 for plain torch."""

    stage: int
    dtype: torch.dtype
    tick: Callable[[], None]  # that it goes on
    seen: list[Any] = field(default_factory=list)

    @property
    def sharded(self) -> bool:
        return self.stage == 3 and world() > 1

    def made(self, model: nn.Module) -> nn.Module:
        """Each rank has made it with values of its own: rank 0's count."""
        if self.stage == 0 and world() > 1:
            for tensor_ in model.parameters():
                dist.broadcast(tensor_.data, 0)
        return model.to(self.dtype)

    def shard(self, model: nn.Module, **options: Any) -> None:
        if self.stage == 3:
            zero_optim.shard_module(model, **options)

    def optimizer(self, params: Any, **options: Any) -> Any:
        options = {"lr": 1e-2, "eps": EPS, "weight_decay": 0.1, **options}
        if self.stage == 0:
            return AveragedByHand([p for _, p in params], **options)
        if self.stage == 2:
            options["stage"] = 2
        return zero_optim.ShardedAdamW(params, **options)

    def see(self, value: Any) -> None:
        """Noted, to be compared."""
        if isinstance(value, nn.Module):
            value = [p for _, p in value.named_parameters()]
        if isinstance(value, dict):
            self.see(list(value))
            value = list(value.values())
        if isinstance(value, list | tuple):
            for item in value:
                self.see(item)
            return
        self.seen.append(value.detach().clone() if isinstance(value, Tensor) else value)
        self.tick()

    def back(self, loss: Tensor, **options: Any) -> None:
        """``loss.backward()``, where there is anything to go back to."""
        self.see(loss)
        if loss.requires_grad:
            loss.backward(**options)

    def stepped(self, opt: Any, model: nn.Module) -> None:
        """``opt.step()``, and afterwards every unit is sharded."""
        opt.step()
        if self.sharded:
            whole = opt.stats()["memory"]["unsharded"]
            if whole:
                raise AssertionError(f"{whole} bytes are whole after step")
            self.all_are_shards(model)

    def all_are_shards(self, model: nn.Module) -> None:
        for name, p in model.named_parameters():
            try:
                p.sum()
            except zero_optim.ShardAccessError:
                continue
            raise AssertionError(f"{name} can be read after step")

    def saved(self, opt: Any) -> Any:
        return opt.state_dict()

    def see_all(self, model: nn.Module, opt: Any) -> None:
        """Parameters, buffers and the optimizer's state, whole."""
        self.see(zero_optim.full_model_state_dict(model, rank=None))
        full = copy.deepcopy(opt.state_dict()) if self.stage == 0 else zero_optim.full_state_dict(opt, rank=None)
        for index in sorted(full["state"]):
            entry = full["state"][index]
            self.see([index, float(entry["step"]), entry["exp_avg"], entry["exp_avg_sq"]])


def auxiliary(model: nn.Module) -> Tensor | float:
    """The sum of what blocks have left in their attributes, which it takes away."""
    total: Tensor | float = 0.0
    for module in model.modules():
        if isinstance(module, Block) and module.aux is not None:
            total, module.aux = total + module.aux, None
    return total


def loss(y: Tensor, target: float = 0.25) -> Tensor:
    return ((y.float() - target) ** 2).mean()


def freeze(module: nn.Module) -> None:
    module.requires_grad_(False)
