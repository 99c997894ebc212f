"""Small trainings whose result depends on the order of work, on a device and over ranks, and what they must give.

``train`` runs one rank of a program; ``expected`` is that rank's result by ``torch.optim`` in one process on the CPU,
from the mean of all ranks' gradients; ``check`` compares the two. A program is correct: it keeps the library's rules,
and orders its own streams as CUDA asks.

Everything is fp32. Arithmetic is not exact: matrix products and the norm add up in an order that depends on the device.
``eps`` is large beside the rounding of a gradient, so that Adam divides no rounding error by a number of its own size.
All results of ``expected`` lie within 1e-7 of those in float64 (seen at widths 16 and 256, on 1 and 4 ranks). TOLERANCE
is twenty times that, and a step moves a parameter by 1e-3 to 1e-2, so a value that is read too early shows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from simulated_gpu.switch import the_device
from torch import Tensor, nn
from training_cases import Planned, maybe_no_sync, raise_in_backward

LR, EPS, WEIGHT_DECAY, MAX_NORM = 1e-2, 1e-3, 0.1, 0.05
TOLERANCE = 2e-6
STEPS, DEPTH, ROWS = 4, 3, 4
SAVED = 1  # the step before which "saved and loaded" saves
CAP_MB = 0.002  # several buckets at the smallest width; never more than a quarter of the parameters in any case
OTHER_WORK = (8192, 4096, 2048, 1024, 512, 256, 128, 128, 128, 128)  # elements
JUNK = 50  # the number of a step, or of a micro-batch, that is computed and then dropped
BUSY_CYCLES = 2_000_000  # about a millisecond

DEFAULT, SIDE = "default", "side"
STREAMS = ((DEFAULT, DEFAULT), (SIDE, SIDE), (DEFAULT, SIDE), (SIDE, DEFAULT))

ALL = (0, 1, 2, 3)
WHAT: Mapping[str, Sequence[int]] = {
    "plain": ALL,
    "micro-batches": ALL,
    "no_sync": ALL,
    "used twice": ALL,  # each weight, within the forward of its unit
    "zeroed at once": ALL,  # one more backward a step, whose gradients are dropped as soon as it returns
    "zeroed in place": ALL,  # one more backward a step, dropped by zero_grad(set_to_none=False)
    "zeroed locally": ALL,  # of three micro-batches the second is under no_sync; two are dropped in place behind it
    "relaid": (1, 2),  # modules are registered in another order than called; the first step leaves gathers under way
    "overlapped": (1, 2),  # at stage 0 a step gathers nothing; at stage 3 every program does
    "overlapped, saved and loaded": (1, 2),
    "two optimizers": ALL,
    "two optimizers, zeroed": ALL,  # as "zeroed at once"
    "clipped": ALL,
    "read": ALL,  # gradients, as soon as backward returns
    "saved and loaded": ALL,
    "raised": ALL,  # one more backward in step 1, which raises on the last rank and is dropped
    "raised, zeroed in place": (1, 2, 3),  # the same, dropped by model.zero_grad(set_to_none=False)
    "remade": ALL,  # two optimizers are closed, one after a step and one after a backward; others go on
    "thawed": ALL,  # the first layer is frozen in the first step
    "half thawed, no_sync": ALL,  # the last block is frozen in the first step; the head, beside it, is used twice
    "edited": ALL,  # a parameter is halved after each step, within gather_parameters(writeback=True)
    "kept": (3,),  # units stay whole after a forward; also saved and loaded, with a forward before it loads
    "kept, on two streams": (3,),  # evaluated on the other stream, where units stay whole; then trained on this one
    "nodes": (3,),  # of two ranks
    "paged": ALL,
    "paged, some stay, clipped": ALL,
    "paged, as there is room": ALL,
    "updated on the host": ALL,
    "updated on the host, micro-batches": ALL,
    "updated on the host, zeroed in place": ALL,
    "parameters on the host": (3,),
    "parameters on the host, edited": (3,),
    "parameters on the host, paged": (3,),
    "parameters on the host, updated there": (3,),
    "parameters on a disk": (3,),
    "parameters on a disk, edited": (3,),
    "parameters on a disk, updated on the host": (3,),
}
"""What a program does, and the stages at which it is allowed. A name may begin with one of STORES."""

OF_MICRO_BATCHES = ("micro-batches", "no_sync", "zeroed locally", "half thawed, no_sync")  # of three
SHARDED_BY: Mapping[str, Mapping[str, Any]] = {
    "kept": {"reshard_after_forward": False},
    "kept, on two streams": {"reshard_after_forward": False},
    "nodes": {"reshard_after_forward": 2},
}
PAGED = {"state_offload": "paged", "device_budget": 0}
SOME_PAGES = 15360  # bytes, at the smallest width: all but one page of units, about half where there are none
ON_HOST, ON_DISK = "parameters on the host", "parameters on a disk"
STORES: Mapping[str, Mapping[str, Any]] = {
    f"{ON_DISK}, updated on the host": {"state_offload": "cpu"},
    ON_DISK: {},
    f"{ON_HOST}, updated there": {"state_offload": "cpu"},
    f"{ON_HOST}, paged": PAGED,
    ON_HOST: {},
    "updated on the host": {"state_offload": "cpu"},
    "paged, some stay": {**PAGED, "device_budget": SOME_PAGES},
    "paged, as there is room": {**PAGED, "device_budget": "auto"},  # from the third step on all stay
    "paged": PAGED,  # none stays
}
"""Where a program has its state. A longer name comes before its beginning."""


@dataclass(frozen=True)
class OrderProgram:
    """A training of STEPS steps.

    Attributes:
        what: a key of WHAT.
        made_on: the stream on which the model is sharded and the optimizer made, "default" or "side".
        trained_on: the stream of forwards, backwards and steps.
        width: of the model's layers.
    """

    stage: int
    what: str = "plain"
    made_on: str = DEFAULT
    trained_on: str = DEFAULT
    width: int = 16

    def __str__(self) -> str:
        return f"stage {self.stage}, {self.what}, made on {self.made_on}, trained on {self.trained_on}"

    @property
    def on_one_stream(self) -> OrderProgram:
        """The same numbers, on the default stream alone."""
        return replace(self, made_on=DEFAULT, trained_on=DEFAULT)

    @property
    def micro_batches(self) -> int:
        return 3 if self.act in OF_MICRO_BATCHES else 1

    @property
    def models(self) -> int:
        return 2 if self.act.startswith("two optimizers") else 1

    @property
    def overlaps(self) -> bool:
        """Whether a step leaves gathers under way."""
        return self.stage in (1, 2) and self.act.startswith(("relaid", "overlapped", "remade"))

    @property
    def store(self) -> str:
        """What ``what`` begins with, of STORES; empty: none."""
        return next((name for name in STORES if f"{self.what}, ".startswith(f"{name}, ")), "")

    @property
    def act(self) -> str:
        """What it does, wherever the state is: ``what`` without ``store``."""
        return self.what[len(self.store) :].removeprefix(", ") or "plain"

    def counted(self) -> Sequence[int]:
        """The micro-batches of a step whose gradients count."""
        return range(2 if self.act == "zeroed locally" else 0, self.micro_batches)


def few_programs(width: int = 16, each: int = len(STREAMS)) -> list[OrderProgram]:
    """So many programs for each key of WHAT, in turn of other stages and streams. Four have every stage that the key
    allows and every pair of streams, but not every combination."""
    return [
        OrderProgram(
            stages[(turn + number // len(STREAMS)) % len(stages)], what, *STREAMS[(turn + number) % len(STREAMS)], width
        )
        for number, (what, stages) in enumerate(WHAT.items())
        for turn in range(each)
    ]


@dataclass(frozen=True)
class Part:
    """The elements of a flat tensor from ``start`` on, as many as ``values`` has."""

    values: Tensor
    start: int = 0


Trained = dict[str, Part]
"""What one rank has, on the CPU: each parameter, "losses" of every counted backward, "norms" of each step and optimizer
before clipping, and "gradient NAME of step N" for every step that read them."""


# ---- the model -------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A residual block, the unit at stage 3."""

    def __init__(self, width: int, *, twice: bool) -> None:
        super().__init__()
        self.up, self.down, self.twice = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), twice

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).tanh())
        return x + self.down(self.up(x).tanh()) if self.twice else x


class Net(nn.Module):
    """[rows, width] to [rows, width]. ``raising``: whether the next backward raises between its last two blocks."""

    def __init__(self, program: OrderProgram) -> None:
        super().__init__()
        self.act, self.raising = program.act, False
        blocks = [Block(program.width, twice=program.act == "used twice") for _ in range(DEPTH)]
        if program.act == "relaid":  # as a model whose layers are registered from the last to the first
            self.head, self.blocks = nn.Linear(program.width, program.width), nn.ModuleList(blocks)
            self.stem = nn.Linear(program.width, program.width)
        else:
            self.stem, self.blocks = nn.Linear(program.width, program.width), nn.ModuleList(blocks)
            self.head = nn.Linear(program.width, program.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, block in enumerate(reversed(self.blocks) if self.act == "relaid" else self.blocks):
            if self.raising and number == 1:
                x = raise_in_backward(x)
            x = block(x)
        return self.head(self.head(x)) if self.act == "half thawed, no_sync" else self.head(x)


def make_model(program: OrderProgram) -> nn.Sequential:
    """On the CPU, with the same values on every rank: one ``Net``, or two where two optimizers share a backward."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*(Net(program) for _ in range(program.models)))


def make_input(program: OrderProgram, rank: int, step: int, micro: int) -> Tensor:
    """[rows, width] on the CPU, multiples of 1/4."""
    generator = torch.Generator().manual_seed((rank * 100 + step) * 100 + micro)
    return torch.randint(-4, 5, (ROWS, program.width), generator=generator) / 4


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


# ---- one rank --------------------------------------------------------------------------------------------------------


class Streams:
    """The streams of a device by name. On a device that has none, all of this does nothing."""

    def __init__(self, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        self._of = {DEFAULT: torch.cuda.default_stream(device), SIDE: torch.cuda.Stream(device)} if on_cuda else {}

    def on(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """What is launched inside goes to this stream."""
        return torch.cuda.stream(self._of[name]) if self._of else contextlib.nullcontext()

    def follow(self, name: str, before: str) -> None:
        """What comes on stream ``name`` waits for what is on ``before`` now."""
        if self._of and name != before:
            self._of[name].wait_stream(self._of[before])

    def busy(self) -> None:
        """The current stream is held up: the host, other streams and other ranks get ahead of it."""
        if self._of:
            torch.cuda._sleep(BUSY_CYCLES)


def train(
    rank: int,
    world_size: int,
    program: OrderProgram,
    device: torch.device,
    process_group: Any = None,
    streams: Streams | None = None,
) -> Trained:
    """This rank's results. Raises what the library raises.

    Collective over ``process_group``, the default one if None, in which this is ``rank`` of ``world_size``.
    """
    streams = Streams(device) if streams is None else streams
    model = make_model(program).to(device)
    freeze(program, model, step=0)
    inputs = make_inputs(program, rank, device)
    streams.follow(program.made_on, DEFAULT)  # the model and the inputs were brought to the device there
    with streams.on(program.made_on):
        shard(program, model, process_group)
        run = Run(program, model, rank, world_size, inputs, streams, process_group)
    streams.follow(program.trained_on, program.made_on)
    with streams.on(program.trained_on):
        losses = run.train()
    streams.follow(DEFAULT, program.trained_on)  # what comes now reads the results there
    values = {name: Part(value) for name, value in _parameters(model).items()}
    values["losses"] = Part(torch.tensor([float(loss) for loss in losses], device="cpu"))
    values["norms"] = Part(torch.tensor([float(norm) for norm in run.norms], device="cpu"))
    values |= {name: Part(part.values.cpu(), part.start) for name, part in run.gradients.items()}
    run.close()
    return values


def train_all(rank: int, world_size: int, programs: Sequence[OrderProgram]) -> list[Trained]:
    """``train`` for each, on the simulated GPU, or on the CPU where none is simulated. An error names its program."""
    trained = []
    for program in programs:
        try:
            trained.append(train(rank, world_size, program, the_device()))
        except Exception as error:
            raise RuntimeError(f"{program}") from error
    return trained


def shard(program: OrderProgram, model: nn.Sequential, process_group: Any) -> None:
    """Collective. Nothing below stage 3."""
    import zero_optim

    options = {**SHARDED_BY.get(program.act, {})}
    if program.act == "nodes" and process_group is None and dist.get_world_size() % 2:
        del options["reshard_after_forward"]
    if program.store.startswith(ON_HOST):
        options["param_offload"] = "cpu"
    elif program.store.startswith(ON_DISK):
        options["param_offload"] = f"nvme:{tempfile.gettempdir()}"
    for net in model if program.stage == 3 else ():
        zero_optim.shard_module(net, (Block,), process_group=process_group, **options)


def make_inputs(program: OrderProgram, rank: int, device: torch.device) -> dict[tuple[int, int], Tensor]:
    """All inputs of a rank, by step and micro-batch. They are on the device before the first step: a copy between steps
    would make the host wait."""
    steps, micros = [*range(STEPS), JUNK], [*range(program.micro_batches), JUNK]
    return {(step, micro): make_input(program, rank, step, micro).to(device) for step in steps for micro in micros}


def freeze(program: OrderProgram, model: nn.Sequential, step: int) -> None:
    """The layers that are frozen in this step, and no others."""
    if program.act == "thawed":
        model[0].stem.requires_grad_(step > 0)
    if program.act == "half thawed, no_sync":
        model[0].blocks[-1].requires_grad_(step > 0)


@torch.no_grad()
def edit(model: nn.Sequential) -> None:
    """Halve a parameter. Collective at stage 3."""
    import zero_optim

    with zero_optim.gather_parameters(model[0], writeback=True):
        model[0].stem.weight.mul_(0.5)


@torch.no_grad()
def _parameters(model: nn.Sequential) -> dict[str, Tensor]:
    """Collective at stage 3."""
    import zero_optim

    with contextlib.ExitStack() as stack:
        for net in model:
            stack.enter_context(zero_optim.gather_parameters(net))
        return {name: parameter.detach().flatten().cpu().clone() for name, parameter in model.named_parameters()}


@dataclass
class Run:
    """A model in training. Collective, as its methods are; ``losses``, ``norms`` and ``gradients`` fill up."""

    program: OrderProgram
    model: nn.Sequential
    rank: int
    world_size: int
    inputs: Mapping[tuple[int, int], Tensor]
    streams: Streams
    process_group: Any
    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Part] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.other_stream = SIDE if self.program.trained_on == DEFAULT else DEFAULT
        self.make_optimizers()

    def make_optimizers(self) -> None:
        import zero_optim

        self.optimizers = [
            zero_optim.ShardedAdamW(
                named,
                lr=LR,
                eps=EPS,
                weight_decay=WEIGHT_DECAY,
                stage=self.program.stage,
                process_group=self.process_group,
                bucket_cap_mb=CAP_MB,
                overlap_param_gather=self.program.overlaps or self.program.stage == 3,
                **STORES.get(self.program.store, {}),
            )
            for named in _owned(self.program, [*self.model.named_parameters()])
        ]
        if self.program.overlaps:
            self.optimizers[0].attach(self.model)

    def train(self) -> list[Tensor]:
        what = self.program.act
        for step in range(STEPS):
            freeze(self.program, self.model, step)
            if step == SAVED and ("saved" in what or what == "kept"):
                self.save_and_load()
            if what.startswith("raised") and step == 1:
                self.raise_and_drop()
            if what in ("zeroed at once", "two optimizers, zeroed"):
                self.backward(step, JUNK)
                self.zero_grad()
            if what == "zeroed in place":
                self.backward(step, JUNK)
                self.zero_grad(set_to_none=False)
            self.losses += self.step(step)
            if what == "edited":
                edit(self.model)
            if what == "remade" and step in (0, 1):
                self.remake(after_backward=step == 1)
        for optimizer in self.optimizers:
            optimizer.wait_for_parameters()
        return self.losses

    def step(self, step: int) -> list[Tensor]:
        """The losses that count."""
        what, losses = self.program.act, []
        if what == "kept, on two streams":
            self.evaluate_on_the_other_stream(step)
        for micro in range(self.program.micro_batches):
            with contextlib.ExitStack() as stack:
                for optimizer in self.optimizers:
                    stack.enter_context(maybe_no_sync(optimizer, self.stays_local(micro)))
                losses.append(self.backward(step, micro))
            if what == "zeroed locally" and micro == 1:
                self.model.zero_grad(set_to_none=False)
        if what == "read":
            named = self.model.named_parameters()
            self.gradients |= {f"gradient {name} of step {step}": _read(p.grad) for name, p in named}
        if what == "clipped":
            self.norms += [optimizer.clip_grad_norm_(MAX_NORM) for optimizer in self.optimizers]
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()
        if what == "kept, on two streams":
            self.work_on_the_other_stream()
        if what == "kept":
            self.evaluate(step)
        return [losses[micro] for micro in self.program.counted()]

    def stays_local(self, micro: int) -> bool:
        """Whether this micro-batch's backward is under no_sync."""
        if self.program.act == "zeroed locally":
            return micro == 1
        return self.program.act.endswith("no_sync") and micro + 1 < self.program.micro_batches

    def evaluate(self, step: int) -> None:
        with torch.inference_mode():
            loss_of(self.model, self.inputs[step, 0])

    def evaluate_on_the_other_stream(self, step: int) -> None:
        here, there = self.program.trained_on, self.other_stream
        self.streams.follow(there, here)
        with self.streams.on(there):
            self.evaluate(step)
        self.streams.follow(here, there)

    def work_on_the_other_stream(self) -> None:
        """In memory that was freed there, whatever its size: what this stream has not read yet must not be among it."""
        with self.streams.on(self.other_stream):
            for numel in OTHER_WORK:
                torch.ones(numel, device=self.inputs[0, 0].device)

    def backward(self, step: int, micro: int = 0) -> Tensor:
        if self.rank == (step + micro) % self.world_size:
            self.streams.busy()
        loss = loss_of(self.model, self.inputs[step, micro])
        loss.backward()
        return loss.detach()

    def raise_and_drop(self) -> None:
        """A backward that raises on the last rank, in the middle, and what settles it."""
        net = self.model[0]
        net.raising = self.rank == self.world_size - 1
        with contextlib.suppress(Planned):
            self.backward(JUNK)
        net.raising = False
        if self.program.act == "raised, zeroed in place":
            # Autograd may have added up on that stream, and waits for none where a backward raises.
            self.streams.follow(self.program.trained_on, self.program.made_on)
            self.model.zero_grad(set_to_none=False)
        else:
            self.zero_grad()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def save_and_load(self) -> None:
        """With a step between, which does not count."""
        saved = self.save()
        self.step(JUNK)
        self.load(saved)

    def remake(self, *, after_backward: bool) -> None:
        """Close the optimizers, and go on with others that have their state."""
        states = self.save()[1]
        if after_backward:
            self.backward(JUNK)
        self.close()
        self.make_optimizers()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)

    def save(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        values = {name: value.detach() for name, value in self.model.state_dict().items()}
        return copy.deepcopy(values), [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]

    def load(self, saved: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        self.model.load_state_dict(saved[0])
        for optimizer, state in zip(self.optimizers, saved[1], strict=True):
            optimizer.load_state_dict(state)

    def close(self) -> None:
        for optimizer in self.optimizers:
            optimizer.close()


def _owned(program: OrderProgram, named: Sequence[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """The parameters of each optimizer. Two have every other one each, so that gradients of both come in turns; at
    stage 3 a model each, since one model has one optimizer."""
    if program.stage == 3:
        return [[entry for entry in named if entry[0].startswith(f"{number}.")] for number in range(program.models)]
    return [list(named[number :: program.models]) for number in range(program.models)]


def _read(grad: Any) -> Part:
    """A copy, made on the current stream: all of a gradient, or this rank's part of it."""
    if hasattr(grad, "local"):
        return Part(grad.local.detach().clone(), grad.start)
    return Part(grad.detach().flatten().clone())


# ---- what it must give -----------------------------------------------------------------------------------------------


def expected(program: OrderProgram, world_size: int, rank: int = 0) -> Trained:
    """What ``train`` must return on ``rank``: losses are its own, all else is the same on every rank."""
    return _expected(program.on_one_stream, world_size)[rank]


@functools.lru_cache(maxsize=1024)
def _expected(program: OrderProgram, world_size: int) -> list[Trained]:
    """Of every rank. Stages, streams and most of what programs do change nothing here."""
    model = make_model(program)
    named = dict(model.named_parameters())
    owned = [[p for _, p in entries] for entries in _owned(program, list(named.items()))]
    optimizers = [torch.optim.AdamW(own, lr=LR, eps=EPS, weight_decay=WEIGHT_DECAY) for own in owned]
    losses: list[list[float]] = [[] for _ in range(world_size)]
    norms: list[float] = []
    read: Trained = {}
    for step in range(STEPS):
        freeze(program, model, step)
        for rank in range(world_size):
            for micro in program.counted():
                loss = loss_of(model, make_input(program, rank, step, micro))
                losses[rank].append(loss.item())
                (loss / world_size).backward()  # gradients add up to their mean
        if program.act == "read":
            read |= {f"gradient {name} of step {step}": Part(p.grad.flatten().clone()) for name, p in named.items()}
        if program.act == "clipped":
            norms += [float(nn.utils.clip_grad_norm_(own, MAX_NORM)) for own in owned]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if program.act == "edited":
            edit(model)
    same = read | {name: Part(p.detach().flatten().clone()) for name, p in named.items()}
    same["norms"] = Part(torch.tensor(norms))
    return [same | {"losses": Part(torch.tensor(of_rank))} for of_rank in losses]


def difference(got: Trained, want: Trained) -> str:
    """Empty when all is within TOLERANCE; else what is not, and by how much."""
    found = [f"{name} is on one side alone" for name in got.keys() ^ want.keys()]
    for name in got.keys() & want.keys():
        a, first = got[name].values, got[name].start
        b = want[name].values[first : first + a.numel()]
        if a.shape != b.shape:
            found.append(f"{name}: {a.numel()} elements instead of {b.numel()}")
            continue
        off = (a.double() - b.double()).abs()
        wrong = ~(off <= TOLERANCE)  # NaN is, too
        if bool(wrong.any()):
            found.append(f"{name}: off by {float(off.max()):.2g} in {int(wrong.sum())} of {a.numel()}")
    return "; ".join(sorted(found)[:6]) + (f"; and {len(found) - 6} more" if len(found) > 6 else "")


def wrong(by_rank: Sequence[Sequence[Trained]], programs: Sequence[OrderProgram]) -> list[str]:
    """What is wrong, a text for each program that is not right. ``by_rank[rank][number of the program]``."""
    results = zip(*by_rank, strict=True)
    return [text for program, of in zip(programs, results, strict=True) if (text := check(of, program))]


def check(results: Sequence[Trained], program: OrderProgram) -> str:
    """Empty when every rank's result is right; else what is wrong, rank by rank."""
    found = []
    for rank, got in enumerate(results):
        if text := difference(got, expected(program, len(results), rank)):
            found.append(f"{program}: rank {rank}: {text}")
    return "\n".join(found)
