"""The words of programs that call a model, parts of it, and its methods.

Every module maps [rows, H] to [rows, H], so that any of them may follow any other. ``call`` hides the form in which a
module returns it. A text runs in plain torch, at stage 2, and at stage 3 on a sharded model: ``verdict`` compares them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import zero_optim
from compare import bits, first_difference
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from random_programs import plain
from random_programs.run import Program, differs, execute
from random_programs.words import Planned, boom, tensors_of

H, ROWS, TOKENS = 12, 3, 12
caught = contextlib.suppress(Planned)
EPS = 0.1  # beside it gradients are small, so that an update is about as large as its gradient


def formed(form: str, y: Tensor) -> Any:
    """``y`` in the form in which a module returns it."""
    a, b = 0.5 * y, 0.25 * torch.tanh(y)
    forms = {"tensor": y, "tuple": (a, b), "list": [a, {"deep": b}], "dict": {"a": a, "b": b, "n": 3}}
    return SimpleNamespace(a=a, b=b, note="beside") if form == "object" else forms[form]


def tensor(out: Any) -> Tensor:
    parts = vars(out) if isinstance(out, SimpleNamespace) else out
    return sum(part for part in tree_leaves(parts) if isinstance(part, Tensor))


def call(module: nn.Module, x: Tensor, **options: Any) -> Tensor:
    """``module(x)`` as a tensor."""
    if getattr(module, "form", "") == "inplace":
        x = x * 1
        module(x, **options)
        return x
    return tensor(module(x, **options))


def recomputed(module: nn.Module, x: Tensor) -> Tensor:
    """``call`` in a checkpoint."""
    return checkpoint(call, module, x, use_reentrant=False)


class Breaks(nn.Module):
    """It calls ``broken`` within its forward."""

    fails = booms = False  # a text sets them, for forward and for backward

    def broken(self, x: Tensor) -> Tensor:
        if self.fails:
            raise Planned
        return boom(x) if self.booms else x


class Lin(Breaks):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)
        self.bias = nn.Parameter(torch.randn(H) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.broken(F.linear(x, self.weight, self.bias)))

    def scaled(self, x: Tensor) -> Tensor:
        """It reads a parameter of its own: to be registered."""
        return x * self.bias


class Block(Breaks):
    """``up`` and ``down``, with what ``kinds`` ask for; it calls itself ``depth`` times.

    "aux": it leaves a loss in an attribute. "ckpt": ``up`` is in a checkpoint. "turned": it calls ``down`` first, which
    is registered last. "unused": it does not call ``down``. Of form "inplace" it changes its argument alone.
    """

    def __init__(self, *kinds: str, form: str = "tensor", depth: int = 0, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.kinds, self.form, self.depth = kinds, form, depth
        self.norm = nn.LayerNorm(H) if "norm" in kinds else nn.Identity()
        self.up, self.inner, self.down = Lin(), inner, Lin()
        self.gain = nn.Parameter(torch.ones(H)) if "gain" in kinds else 1.0
        self.drop = nn.Dropout(0.25 if "drop" in kinds else 0.0)
        self.register_buffer("calls", torch.zeros(()))
        self.far: list[nn.Module] = []  # modules of other blocks: in a list, they are not registered here

    def forward(self, x: Tensor, depth: int | None = None) -> Any:
        self.calls += 1
        depth = self.depth if depth is None else depth
        h = self.norm(x.clone() if self.form == "inplace" else x)
        first, last = (self.down, self.up) if "turned" in self.kinds else (self.up, self.down)
        h = recomputed(first, h) if "ckpt" in self.kinds else first(h)
        for module in [*([] if self.inner is None else [self.inner]), *self.far]:
            h = call(module, h)
        h = self.broken(h)
        h = self.drop((h if "unused" in self.kinds else last(h)) * self.gain)
        if depth:
            h = h * 0.5 + call(self, h * 0.5, depth=depth - 1) * 0.5
        if "aux" in self.kinds:
            self.aux = (h.float() ** 2).mean()
        return x.add_(h) if self.form == "inplace" else formed(self.form, x + h)

    def half(self, x: Tensor) -> Tensor:
        """It may read a parameter of its own: to be registered."""
        return self.up(x) * self.gain

    def both(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Stack(nn.ModuleList):
    """A container with a parameter of its own, and a forward."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__(blocks)
        self.shift = nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = call(block, x)
        return x + self.shift


class Model(Breaks):
    """Blocks in a container, a "stack" if ``kinds`` ask for it. ``ckpt``: they are in checkpoints, of so many each."""

    def __init__(self, blocks: Sequence[nn.Module], *kinds: str, ckpt: int = 0, form: str = "tensor") -> None:
        super().__init__()
        self.emb = nn.Embedding(TOKENS, H) if "emb" in kinds else None
        self.blocks: Any = Stack(blocks) if "stack" in kinds else nn.ModuleList(blocks)
        self.own = nn.Parameter(1 + torch.randn(H) / 8) if "own" in kinds else 1.0
        self.head = Lin() if "head" in kinds else nn.Identity()
        self.form, self.ckpt = form, ckpt

    def embedded(self, x: Tensor) -> Tensor:
        return x if self.emb is None else x + self.emb((x[:, 0].detach().float().abs() * 10).long() % TOKENS)

    def forward(self, x: Tensor, skip: Sequence[int] = (), part: Sequence[int] = ()) -> Any:
        """It leaves out the blocks of ``skip``, and of ``part`` calls ``up`` alone."""
        x = self.embedded(x)
        if isinstance(self.blocks, Stack) and not (skip or part):
            x = self.broken(self.blocks(x))
        else:
            left = [n for n in range(len(self.blocks)) if n not in skip]
            x = self._some(x, [self.blocks[n].up if n in part else self.blocks[n] for n in left])
        return formed(self.form, self.head(x * self.own))

    def _some(self, x: Tensor, modules: Sequence[nn.Module]) -> Tensor:
        size = self.ckpt or 1
        for first in range(0, len(modules), size):
            some = modules[first : first + size]
            x = self.broken(x) if first + size >= len(modules) else x  # before the last of them
            x = checkpoint(self.through, x, some, use_reentrant=False) if self.ckpt else self.through(x, some)
        return x

    def through(self, x: Tensor, modules: Sequence[nn.Module]) -> Tensor:
        for module in modules:
            x = call(module, x)
        return x

    def encode(self, x: Tensor) -> Tensor:
        return self.through(self.embedded(x), [*self.blocks])

    def score(self, x: Tensor) -> Tensor:
        """It may read a parameter of its own: to be registered."""
        return call(self, x) / (1 + self.own**2)


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module, *kinds: str) -> None:
        super().__init__()
        self.model = model
        self.own = nn.Parameter(1 + torch.randn(H) / 8) if "own" in kinds else 1.0

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return call(self.model, x, **options) * self.own


# -- the words ---------------------------------------------------------------------------------------------------------


def auxiliary(model: nn.Module) -> Tensor | float:
    """The sum of what blocks have left in their attributes, which it takes away."""
    total: Tensor | float = 0.0
    for module in model.modules():
        total = total + getattr(module, "aux", 0.0)
        vars(module).pop("aux", None)
    return total


def loss(y: Tensor, model: nn.Module) -> Tensor:
    return ((y.float() - 0.25) ** 2).mean() + auxiliary(model)


def _whole(value: Any) -> Any:
    """Copies, of a module's parameters too."""
    if isinstance(value, nn.Module):
        value = dict(value.named_parameters())
    if isinstance(value, dict):
        return {key: _whole(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(one) for one in value]
    return value.detach().clone() if isinstance(value, Tensor) else value


class ModelWords:
    """``sees(value)`` takes what both libraries must agree on, and stages 2 and 3 too."""

    copied = staticmethod(copy.deepcopy)

    def __init__(self, library: Any, rank: int, world: int, sees: Any, stage: int) -> None:
        self.library, self.rank, self.world, self.sees, self.stage = library, rank, world, sees, stage
        self.sharded = library is zero_optim and stage == 3 and world > 1
        self.full, self.load_full = library.full_state_dict, library.load_full_state_dict
        self.full_model = library.full_model_state_dict
        self.register = library.register_forward_method
        self.gathered = library.gather_parameters
        # Where an edit raises, on a model that is not sharded zero_optim would keep it.
        self.undone = partial((library if self.sharded else plain).gather_parameters, writeback=True)
        self.dtype = torch.float32

    def names(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        return {**globals(), **own}

    def made(self, model: nn.Module, dtype: str) -> nn.Module:
        """Each rank has made it with values of its own: rank 0's count."""
        self.dtype = getattr(torch, dtype)
        self.model = model.to(self.dtype)
        return model

    def shard(self, model: nn.Module, **options: Any) -> None:
        if self.stage == 3:
            self.library.shard_module(model, **options)

    def optimizer(self, params: Any, **options: Any) -> Any:
        groups = [{"params": params, "lr": 1e-2, "weight_decay": 0.1}]
        stage = {} if self.stage == 3 else {"stage": self.stage}
        return self.library.ShardedOptimizer(groups, rule=self.library.rules.AdamW(eps=EPS), **stage, **options)

    def X(self, number: int) -> Tensor:
        """Data of this rank."""
        return torch.randn(ROWS, H, generator=torch.Generator().manual_seed(10 * number + self.rank)).to(self.dtype)

    def see(self, value: Any) -> None:
        self.sees(_whole(value))

    def back(self, loss: Tensor, **options: Any) -> None:
        """``loss.backward()``, where there is anything to go back to."""
        self.see(loss)
        try:
            if loss.requires_grad:
                loss.backward(**options)
        finally:  # what checkpoints leave as they compute again has no graph any more
            auxiliary(self.model)

    def stepped(self, opt: Any, model: nn.Module) -> None:
        """``opt.step()``, and afterwards every unit is sharded, but for what is gathered ahead of the next forward."""
        opt.step()
        if not self.sharded:
            return
        units = opt.engine.sharded_model.units
        ahead = [unit for unit in units if unit.ahead is not None]
        resident = opt.stats()["memory"]["unsharded"] - sum(flat.nbytes() for unit in ahead for flat in unit.flats)
        if resident or len(ahead) > 2 or (ahead and units[0] not in ahead):
            raise AssertionError(f"{resident} bytes, and {[unit.label for unit in ahead]}, are resident after step")
        for name, p in model.named_parameters():
            with contextlib.suppress(zero_optim.ShardAccessError):
                p.sum()
                raise AssertionError(f"{name} can be read after step")

    def see_all(self, model: nn.Module, opt: Any) -> None:
        """Parameters, buffers and the optimizer's state, whole."""
        self.see(self.full_model(model, rank=None))
        self.see(tensors_of(self.library.full_state_dict(opt, rank=None)))


def play(program: Program, library: Any, rank: int, stage: int) -> list[Any]:
    """What a rank sees."""
    torch.manual_seed(rank)
    seen: list[Any] = []
    where = "in plain torch" if library is plain else f"at stage {stage}"
    names = ModelWords(library, rank, program.world, seen.append, stage).names()
    execute(program.text, f"<{where}>", names)["opt"].close()
    return seen


def verdict(program: Program, rank: int) -> str | None:
    """What is wrong with what this rank sees; None: nothing. Stages 2 and 3 differ in no bit, but for a norm's last."""
    at_2 = play(program, zero_optim, rank, 2)
    if found := differs(program, play(program, plain, rank, 3), at_2):
        return f"rank {rank}, what it saw at stage 2: {found}"
    at_3 = play(program, zero_optim, rank, 3)
    clips = "grad_norm" in program.text
    if found := differs(program, at_2, at_3) if clips else first_difference(at_2, at_3, bits):
        return f"rank {rank}, what it saw at stage 3, where that of stage 2 is right: {found}"
    return None
