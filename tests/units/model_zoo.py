"""Models and loops for the tests of stage 3, as data: whatever a forward, a backward and a loop may do, by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import zero_optim
from sharded_cases import Block
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zero_optim.params.param_shard import ParamShard

WIDTH, VOCABULARY = 12, 17


class Chain(nn.Module):
    """An embedding, blocks in a row and a head. Subclasses change ``run``."""

    def __init__(self, block: Callable[[], nn.Module] = lambda: Block(WIDTH), depth: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, tokens: Tensor, rank: int = 0, step: int = 0) -> Tensor:
        return self.head(self.run(self.embedding(tokens), rank, step))


def tokens(rank: int, step: int) -> Tensor:
    """[3, 7] int64"""
    return torch.randint(VOCABULARY, (3, 7), generator=torch.Generator().manual_seed(100 * rank + step))


def entropy(logits: Tensor, batch: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def chain_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    batch = tokens(rank, step)
    return entropy(model(batch[:, :-1], rank, step), batch)


@dataclass(frozen=True)
class Program:
    """How a model is trained. ``between(model, opt, rank, step)`` runs after each step."""

    model: Callable[[], nn.Module] = Chain
    loss: Callable[[nn.Module, int, int], Tensor] = chain_loss
    units: Sequence[Any] = (Block,)
    between: Callable[[nn.Module, Any, int, int], object] | None = None
    dtype: torch.dtype | None = None
    steps: int = 3
    params: Callable[[nn.Module], Any] = field(default=lambda model: model.parameters())


PROGRAMS: dict[str, Program] = {}


# -- checkpointing ---------------------------------------------------------------------------------------------------


class OneByOne(Chain):
    reentrant = False

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Segments(Chain):
    """Two blocks at a time; ``inner``: and each of them again within."""

    outer, inner = False, None

    def part(self, x: Tensor, first: int) -> Tensor:
        for block in (self.blocks[first], self.blocks[first + 1]):
            x = block(x) if self.inner is None else checkpoint(block, x, use_reentrant=self.inner)
        return x

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for first in (0, 2):
            x = checkpoint(self.part, x, first, use_reentrant=self.outer)
        return x


class CheckpointsWithin(Block):
    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(lambda y: self.down(F.gelu(self.up(self.norm(y)))), x, use_reentrant=self.reentrant)


class PartsCheckpointed(Chain):
    """The parts of its units, and no unit."""

    reentrant = False

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for block in self.blocks:
            h = checkpoint(block.up, block.norm(x), use_reentrant=self.reentrant)
            x = x + checkpoint(block.down, F.gelu(h), use_reentrant=self.reentrant)
        return x


def whole_model_loss(model: nn.Module, rank: int, step: int, reentrant: bool) -> Tensor:
    batch = tokens(rank, step)
    if reentrant:
        x = torch.zeros((), requires_grad=True)  # else re-entrant checkpoints give no gradient
        logits = checkpoint(lambda x, batch: model(batch) + x, x, batch[:, :-1], use_reentrant=True)
    else:
        logits = checkpoint(model, batch[:, :-1], use_reentrant=False)
    return entropy(logits, batch)


for kind in (False, True):
    label = "reentrant" if kind else "plain"
    PROGRAMS[f"checkpoint a block, {label}"] = Program(type("N", (OneByOne,), {"reentrant": kind}))
    PROGRAMS[f"checkpoint within a block, {label}"] = Program(
        partial(Chain, partial(type("B", (CheckpointsWithin,), {"reentrant": kind}), WIDTH))
    )
    PROGRAMS[f"checkpoint parts of blocks, {label}"] = Program(type("N", (PartsCheckpointed,), {"reentrant": kind}))
    PROGRAMS[f"checkpoint the whole model, {label}"] = Program(loss=partial(whole_model_loss, reentrant=kind))
    for inner in (None, False, True):
        PROGRAMS[f"checkpoint segments, {label}, within: {inner}"] = Program(
            type("N", (Segments,), {"outer": kind, "inner": inner})
        )


# -- which units are called, how often and in what order --------------------------------------------------------------


class Reuse(Chain):
    """Weight sharing: in a row, and interleaved."""

    checkpoints: bool | None = None

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for number in (0, 1, 2, 2, 0, 1, 2, 3):
            block = self.blocks[number]
            again = self.checkpoints is not None and number < 2
            x = checkpoint(block, x, use_reentrant=self.checkpoints) if again else block(x)
        return x


class Chosen(Chain):
    """Blocks in the order that ``choose(rank, step)`` gives."""

    choose: Callable[[int, int], Sequence[int]]

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for number in type(self).choose(rank, step):
            x = self.blocks[number](x)
        return x


CHOICES: dict[str, Callable[[int, int], Sequence[int]]] = {
    "another order on other steps": lambda rank, step: ((0, 1, 2, 3), (3, 1, 2, 0), (2, 2, 0, 2))[step % 3],
    "skipped on all ranks": lambda rank, step: [n for n in range(4) if (n + step) % 3],
    "skipped on some ranks": lambda rank, step: [n for n in range(4) if (n + step + rank) % 3],
    "never used on rank 0": lambda rank, step: [n for n in range(4) if rank or n not in (1, 2)],
    "first step different on rank 1": lambda rank, step: (3,) if rank and not step else range(4),
    "one never used on rank 0, not as registered": lambda rank, step: (0, 2, 3, 1) if rank else (0, 2, 1),
    "none on every other step": lambda rank, step: range(4) if step % 2 else (),
}


def unreached_loss(model: nn.Module, rank: int, step: int, at: int) -> Tensor:
    loss = chain_loss(model, rank, step)
    return torch.zeros(()) if step == at and rank == 1 else loss


def forward_without_backward(model: nn.Module, opt: Any, rank: int, step: int) -> None:
    for extra in range(2):
        chain_loss(model, rank, 70 + extra)


PROGRAMS |= {
    **{name: Program(type("N", (Chosen,), {"choose": choose}), steps=5) for name, choose in CHOICES.items()},
    "units called twice": Program(Reuse),
    "units called twice, checkpointed": Program(type("N", (Reuse,), {"checkpoints": False})),
    "units called twice, checkpointed, reentrant": Program(type("N", (Reuse,), {"checkpoints": True})),
    "a loss that reaches nothing on one rank": Program(loss=partial(unreached_loss, at=1)),
    "a first loss that reaches nothing on one rank": Program(loss=partial(unreached_loss, at=0)),
    "forwards without a backward": Program(between=forward_without_backward),
}


# -- what units are and hold ------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Outer(nn.Module):
    """A unit with parameters of its own and two units within."""

    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.two = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            x = x + self.one(self.norm(x))
            return self.out(x + self.two(x))
        x = x + checkpoint(self.one, self.norm(x), use_reentrant=self.reentrant)
        return self.out(x + checkpoint(self.two, x, use_reentrant=not self.reentrant))


class Skipping(Inner):
    """Returns what it is given in the first step, as layer drop does."""

    skips = True

    def forward(self, x: Tensor) -> Tensor:
        return x if self.skips else super().forward(x)


class EndsInSkipping(nn.Module):
    """A unit that returns the very tensor that the unit within it has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), Skipping()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(x))


def skip_no_more(model: nn.Module, opt: Any, rank: int, step: int) -> None:
    for module in model.modules():
        if isinstance(module, Skipping):
            module.skips = False


def mean_square(model: nn.Module, rank: int, step: int) -> Tensor:
    noise = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * rank + step))
    return model(noise).square().mean()


@dataclass
class Answer:
    nothing: None
    nested: dict[str, list[tuple[Tensor, int]]]


class Answering(Block):
    """Takes keywords, returns tensors deep within other things."""

    def forward(self, x: Tensor, *, scale: Tensor) -> Answer:  # type: ignore[override]
        return Answer(None, {"x": [(super().forward(x) * scale, 1)]})


class Asking(Chain):
    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for block in self.blocks:
            x = block(x=x, scale=torch.tensor(1.5)).nested["x"][0][0]
        return x


class Nothing(nn.Module):
    """Without parameters, or with an empty one."""

    def __init__(self, empty: bool) -> None:
        super().__init__()
        if empty:
            self.none = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5 + sum(parameter.sum() for parameter in self.parameters())


class Hollow(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, Nothing(empty=True))
        self.blocks.insert(3, Nothing(empty=False))


class Mixed(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm.bfloat16()
        self.narrow = nn.Linear(width, width).half()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.narrow(x.half()).float()
        return x + self.down(F.gelu(self.up(self.norm(x.bfloat16()).float())))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.lstm(x)[0]


class Convolution(nn.Module):
    """With buffers that the forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.batch_norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.batch_norm(self.convolution(x)).relu()


def images() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 4, 1), *(Convolution() for _ in range(3)))
    return model.to(memory_format=torch.channels_last)


def images_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    image = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(10 * rank + step))
    return model(image.to(memory_format=torch.channels_last)).square().mean()


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 24, dropout=0.0, batch_first=True)
    return Chain(lambda: nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), 1)


def parametrized() -> nn.Module:
    model = Chain()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
        nn.utils.parametrizations.spectral_norm(block.down)
    return model


def write_shards(model: nn.Module, opt: Any, rank: int, step: int) -> None:
    """Where ``step`` has begun to gather some of them for the next forward."""
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter.local if isinstance(parameter, ParamShard) else parameter).mul_(0.5)


class TiedByUse(Chain):
    """Its embedding is tied where it is used: no module registers the weight twice."""

    def forward(self, tokens: Tensor, rank: int = 0, step: int = 0) -> Tensor:
        return F.linear(self.run(self.embedding(tokens), rank, step), self.embedding.weight, self.head.bias)


PROGRAMS |= {
    "units within units": Program(partial(Chain, Outer), units=(Outer, Inner)),
    "units by name": Program(partial(Chain, Outer), units=("Outer", "Inner")),
    "shards written between steps": Program(between=write_shards),
    "embedding and head as units": Program(units=(Block, nn.Embedding, "head")),
    "an embedding whose weight is read without a call": Program(TiedByUse),
    "units within units, inner ones checkpointed": Program(
        partial(Chain, type("Outer", (Outer,), {"reentrant": False})), units=(Outer, Inner)
    ),
    "units within units, all checkpointed": Program(partial(OneByOne, Outer), units=(Outer, Inner)),
    "units within units, all checkpointed, reentrant": Program(
        partial(type("N", (OneByOne,), {"reentrant": True}), type("Outer", (Outer,), {"reentrant": True})),
        units=(Outer, Inner),
    ),
    "units within units, skipped in the first step": Program(
        partial(Chain, EndsInSkipping), units=(EndsInSkipping, Skipping), between=skip_no_more
    ),
    "a last unit that is skipped in the first step": Program(
        lambda: nn.Sequential(Inner(), Skipping()), mean_square, units=(Inner, Skipping), between=skip_no_more
    ),
    "keywords and dataclasses": Program(partial(Asking, partial(Answering, WIDTH))),
    "units without parameters": Program(Hollow, units=(Block, Nothing)),
    "mixed dtypes": Program(partial(Chain, partial(Mixed, WIDTH))),
    "LSTM": Program(partial(Chain, Recurrent), units=(Recurrent,)),
    "channels last, batch norm": Program(images, images_loss, (Convolution,)),
    "transformer encoder": Program(transformer, units=(nn.TransformerEncoderLayer,)),
    "weight and spectral norm": Program(parametrized),
    "the model is the one unit": Program(units=(Chain,)),
    "bf16": Program(dtype=torch.bfloat16),
}


# -- frozen, and thawed later -----------------------------------------------------------------------------------------


def frozen(which: str) -> nn.Module:
    model = Chain()
    if which == "first":
        model.embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
    elif which == "middle":
        model.blocks[1].requires_grad_(False)
    elif which == "last":
        model.blocks[3].requires_grad_(False)
        model.head.requires_grad_(False)
    elif which == "half":
        for block in model.blocks:
            block.up.requires_grad_(False)
    elif which == "most":
        model.requires_grad_(False)
        model.blocks[2].norm.requires_grad_(True)
    return model


def thaw(model: nn.Module, opt: Any, rank: int, step: int, what: str) -> None:
    if step == 1 and what == "all":
        model.requires_grad_(True)
    elif step == 1:
        model.blocks[0].up.weight.requires_grad = True


def freeze(model: nn.Module, opt: Any, rank: int, step: int) -> None:
    if step in (1, 3):
        model.blocks[1].requires_grad_(step == 3)


PROGRAMS |= {
    **{f"frozen {which}": Program(partial(frozen, which)) for which in ("middle", "last")},
    **{
        f"frozen {which}, thawed {what}": Program(partial(frozen, which), between=partial(thaw, what=what), steps=4)
        for which in ("first", "half", "most")
        for what in ("all", "one")
    },
    "frozen later, and thawed": Program(between=freeze, steps=5),
}


# -- what goes on between steps, and around losses --------------------------------------------------------------------


def evaluate(model: nn.Module, opt: Any, rank: int, step: int, mode: Callable[[], Any]) -> None:
    model.eval()
    with mode():
        chain_loss(model, rank, 80)
        chain_loss(model, rank, 81)
    model.train()


def edit(model: nn.Module, opt: Any, rank: int, step: int) -> None:
    """In place, where an evaluation may have left parameters unsharded."""
    with torch.no_grad():
        chain_loss(model, rank, 80)
        for module in (model.blocks[0].up, model.head):
            try:
                module.weight.mul_(0.5)
            except zero_optim.ShardAccessError:
                with zero_optim.gather_parameters(module, writeback=True):
                    module.weight.mul_(0.5)


def penalty(model: nn.Module, rank: int, step: int) -> Tensor:
    """A gradient penalty on what goes into the model."""
    x = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(100 * rank + step)).requires_grad_()
    score = model(x).sum(-1)
    (grad,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.square().mean() + (grad.norm() - 1) ** 2


class Continuous(Chain):
    def forward(self, x: Tensor, rank: int = 0, step: int = 0) -> Tensor:
        return self.head(self.run(x, rank, step))


def autocast_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return chain_loss(model, rank, step)


def on_cpu_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return chain_loss(model, rank, step)


def until_it_works(model: nn.Module, rank: int, step: int) -> Tensor:
    with contextlib.suppress(RuntimeError):
        return chain_loss(model, rank, step)
    return chain_loss(model, rank, step)


class Catching(Chain):
    """A block that raises is left out, on that rank alone."""

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for number, block in enumerate(self.blocks):
            try:
                x = block(x) if (number, rank) != (1, step % 2) else block(x[..., :2])
            except RuntimeError:
                x = x * 0.5
        return x


class Leaving(Chain):
    """Each rank leaves a first forward after another block, by an exception."""

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        self.attempt = not getattr(self, "attempt", False)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.attempt and number == (rank + step) % 3:
                self.blocks[number + 1](x[..., :2])
        return x


def given_up(model: nn.Module, rank: int, step: int) -> Tensor:
    """A backward that is dropped on all ranks in the second step; in the third, a loss that reaches nothing on one."""
    if step == 1:
        chain_loss(model, rank, 60).backward()
        model.zero_grad()
    return unreached_loss(model, rank, step, at=2)


PROGRAMS |= {
    "evaluation, no_grad": Program(between=partial(evaluate, mode=torch.no_grad)),
    "evaluation, inference_mode": Program(between=partial(evaluate, mode=torch.inference_mode)),
    "edits of what an evaluation left unsharded": Program(between=edit, dtype=torch.bfloat16),
    "gradient penalty": Program(Continuous, penalty),
    "autocast": Program(loss=autocast_loss),
    "saved on the CPU": Program(loss=on_cpu_loss),
    "a unit raises on one rank and is caught": Program(Catching, steps=4),
    "ranks leave a forward at different units": Program(Leaving, until_it_works, steps=4),
    "a backward is given up, a loss reaches nothing on one rank": Program(loss=given_up, steps=4),
    "parameters taken before, in groups": Program(
        params=lambda model: [
            {"params": [p for p in model.parameters() if p.ndim > 1]},
            {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0, "lr": 1e-3},
        ]
    ),
}


# -- what a unit does beside taking and returning tensors --------------------------------------------------------------


class WithoutResidual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


class ResidualOutside(Chain):
    """The root adds in place to what a unit has returned, which is a view."""

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y += x
            x = y
        return x


class Balanced(Block):
    """Keeps a second loss on itself, as mixtures of experts do; ``frozen``: through parameters without gradients."""

    frozen = False

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.gate = nn.Linear(width, 3, bias=False).requires_grad_(not self.frozen)

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.balance = self.gate(x[:, 0]).sin().sum()
        return y


class BalancedEarly(Balanced):
    """Sets the loss before it has a result: that may take the place in memory of the loss of the last forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.balance = self.gate(x[:, 0]).sin().sum()
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Forces(Chain):
    """Goes backward within its forward, as models of energies do, and forward again with what comes of it."""

    def forward(self, tokens: Tensor, rank: int = 0, step: int = 0) -> Tensor:
        with torch.enable_grad():
            x = self.embedding(tokens) * 1.0
            logits = self.head(self.run(x, rank, step))
            (force,) = torch.autograd.grad(logits.square().sum(), x, retain_graph=True, create_graph=step % 2 == 0)
            return logits + self.head(self.blocks[1](x + force)) * self.head.bias.sum()


class Relaxing(Outer):
    """Goes backward through a unit within it, and needs parameters of its own afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().requires_grad_()
        with torch.enable_grad():
            (force,) = torch.autograd.grad(self.one(self.norm(y)).sum(), y)
        return self.out(x + self.two(self.norm(x + force)))


class Towers(Chain):
    """The second of two towers is thawed after the first step: its blocks lie between others that are trained."""

    def __init__(self) -> None:
        super().__init__(depth=6)
        self.other = nn.Embedding(VOCABULARY, WIDTH)
        for module in (self.other, *self.blocks[2:4]):
            module.requires_grad_(False)

    def forward(self, tokens: Tensor, rank: int = 0, step: int = 0) -> Tensor:
        one, two = self.embedding(tokens), self.other(tokens)
        for number in (0, 1):
            one, two = self.blocks[number](one), self.blocks[2 + number](two)
        return self.head(self.blocks[5](self.blocks[4](one + two)))


def thaw_other(model: nn.Module, opt: Any, rank: int, step: int) -> None:
    model.requires_grad_(True)


def penalty_first(model: nn.Module, rank: int, step: int) -> Tensor:
    """Another forward lies between the two backwards of the penalty."""
    x = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(7 + rank)).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return model(x.detach() + 1).square().mean() + (grad.norm() - 1) ** 2


def edit_before_step(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = chain_loss(model, rank, step)
    loss.backward()
    edit(model, None, rank, step)
    return loss.detach()


def balanced_loss(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = chain_loss(model, rank, step)
    return loss + 0.1 * sum(block.balance for block in model.blocks)


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, count: int) -> Tensor:
        return self.weight[:count] if count < 6 else self.weight if count == 6 else self.weight.detach()


class Positioned(Chain):
    """What a unit returned is its own parameter, or a view of it, and is used after others."""

    count = 5

    def __init__(self) -> None:
        super().__init__()
        self.positions = Positions()

    def run(self, x: Tensor, rank: int, step: int) -> Tensor:
        positions = self.positions(self.count)
        x = super().run(x, rank, step)
        return x + F.pad(positions, (0, 0, 0, x.shape[1] - len(positions)))


PROGRAMS |= {
    "the root changes what a unit returned": Program(partial(ResidualOutside, partial(WithoutResidual, WIDTH))),
}
PROGRAMS |= {
    "a loss kept on the unit": Program(partial(Chain, partial(Balanced, WIDTH)), balanced_loss),
    "a loss kept on the unit, frozen": Program(
        partial(Chain, partial(type("Balanced", (Balanced,), {"frozen": True}), WIDTH)), balanced_loss
    ),
    "a loss kept on the unit, checkpointed": Program(partial(OneByOne, partial(Balanced, WIDTH)), balanced_loss),
    "a loss set before the result": Program(partial(Chain, partial(BalancedEarly, WIDTH)), balanced_loss, steps=5),
    "a loss set before the result, frozen": Program(
        partial(Chain, partial(type("B", (BalancedEarly,), {"frozen": True}), WIDTH)), balanced_loss, steps=5
    ),
    "a backward within a forward": Program(Forces, steps=4),
    "a backward within a unit's forward": Program(partial(Chain, Relaxing), units=(Relaxing, Inner)),
    "a tower thawed": Program(Towers, between=thaw_other, steps=4),
    "gradient penalty, another forward between": Program(Continuous, penalty_first),
    "edits between backward and step": Program(loss=edit_before_step, dtype=torch.bfloat16),
}
REFUSED = {
    "a view of its parameter": Program(Positioned, units=(Block, Positions)),
    "its parameter": Program(type("N", (Positioned,), {"count": 6}), units=(Block, Positions)),
    "its parameter, detached": Program(type("N", (Positioned,), {"count": 7}), units=(Block, Positions)),
}
