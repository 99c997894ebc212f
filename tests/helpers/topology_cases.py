"""A table of topologies: what each rank of one trains, and the same in one process. The training is eventful_cases'."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import eventful_cases
import expert_cases
import megatron_cases
import pipeline_cases
import tensor_cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from eventful_cases import ABSENT, MICRO, OVERFLOW, Job, Scaled
from torch import Tensor, nn
from torch.distributed import DeviceMesh, pipelining
from torch.distributed.device_mesh import init_device_mesh
from training_cases import maybe_no_sync

Alone = tuple[nn.Module, Callable[[int], None]]
Part = Callable[[int, str], tuple[str, Callable[[Tensor], Tensor]]]


def whole_of(rank: int, name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
    return name, lambda whole: whole


@dataclass(frozen=True)
class Topology:
    """How a model is trained on several ranks.

    Attributes:
        make: collective; what this rank trains, in a dtype.
        alone: the model in one process, and what makes the gradients of a step there.
        stages: those that it trains at.
        part: what a rank has of a parameter, and its name in one process.
        together: how many ranks have a norm, or a report, in common: those of one stage of a pipeline.
    """

    ranks: int
    make: Callable[[torch.dtype], Job]
    alone: Callable[[], Alone]
    stages: tuple[int, ...] = (0, 1, 2, 3)
    part: Part = whole_of
    together: int = 0
    tolerance: float = 2e-6


def mesh_of(**sizes: int) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def overflowing(step: int) -> float:
    """A factor of this rank's loss: the last rank overflows."""
    return math.inf if step == OVERFLOW and dist.get_rank() == dist.get_world_size() - 1 else 1.0


def used(step: int) -> tuple[int, ...]:
    """The blocks that have a part in a step."""
    return (0,) if step == ABSENT else (0, 1)


# -- the same parameters on all ranks ----------------------------------------------------------------------------------


def sample(step: int, micro: int, of: int) -> Tensor:
    generator = torch.Generator().manual_seed((of * 100 + step) * 10 + micro)
    return torch.randn(8, eventful_cases.WIDTH, generator=generator)


def replicated(
    ranks: int,
    mesh: Callable[[], DeviceMesh | None],
    shards: int,
    data: Callable[[int, int, int], Tensor],
    stages: tuple[int, ...] = (0, 1, 2, 3),
    **given: Any,
) -> Topology:
    """``data``: of a rank, step and micro-batch. ``given``: beside the mesh."""

    def make(dtype: torch.dtype) -> Job:
        rank = dist.get_rank()
        torch.manual_seed(rank)  # rank 0's parameters are everyone's
        model, own = eventful_cases.Net().to(dtype), mesh()
        inputs = lambda step, micro: data(rank, step, micro).to(dtype)  # noqa: E731

        def backwards(opt: Any, step: int, scaled: Scaled) -> None:
            for micro in range(MICRO):
                with maybe_no_sync(opt, micro < MICRO - 1):
                    scaled(eventful_cases.loss_of(model, inputs, step, micro) * overflowing(step)).backward()

        return Job(model, backwards, {} if own is None else {"mesh": own, **given}, shards=lambda name: shards)

    def alone() -> Alone:
        torch.manual_seed(0)
        model = eventful_cases.Net()
        everything = lambda step, micro: torch.cat([data(rank, step, micro) for rank in range(ranks)])  # noqa: E731

        def backwards(step: int) -> None:
            for micro in range(MICRO):
                eventful_cases.loss_of(model, everything, step, micro).backward()

        return model, backwards

    return Topology(ranks, make, alone, stages)


def of_each(rank: int, step: int, micro: int) -> Tensor:
    return sample(step, micro, rank)


def of_a_sequence(rank: int, step: int, micro: int) -> Tensor:
    """Two data-parallel ranks, and each has a half of the sequence of one of them."""
    return sample(step, micro, rank // 2).chunk(2)[rank % 2]


# -- slices of DTensors ------------------------------------------------------------------------------------------------


def tensor_parallel(
    frozen: tuple[str, ...] = ("blocks.0.up.weight", "blocks.1.norm1.weight"),
    replicas: int = 1,
    over_all: bool = False,
    **options: Any,
) -> Topology:
    """Two data-parallel ranks, or replicas of two, each of two slices. ``over_all``: state is over all of these."""
    way = tensor_cases.Way(frozen=frozen, **options)

    def make(dtype: torch.dtype) -> Job:
        mesh = mesh_of(replicate=replicas, shard=2, tp=2)
        model = tensor_cases.make_model(replace(way, dtype=dtype), mesh["tp"])

        def backwards(opt: Any, step: int, scaled: Scaled) -> None:
            for micro in range(MICRO):
                with maybe_no_sync(opt, micro < MICRO - 1), tensor_cases.losses(sequence=way.sequence):
                    loss = tensor_cases.loss_of(model, dist.get_rank() // 2, step, micro, used(step))
                    scaled(loss * overflowing(step)).backward()

        data = mesh["shard"] if replicas == 1 else mesh["replicate", "shard"]
        given = {"mesh": data, **({"state_over": "all"} if over_all else {})}
        shards = 2 * replicas if over_all else 2
        return Job(model, backwards, given, (tensor_cases.Block,), shards=lambda name: shards)

    def alone() -> Alone:
        model, data = tensor_cases.make_model(way), 2 * replicas

        def backwards(step: int) -> None:
            for micro in range(MICRO):
                for rank in range(data):
                    (tensor_cases.loss_of(model, rank, step, micro, used(step)) / data).backward()

        return model, backwards

    return Topology(4 * replicas, make, alone, (1, 2, 3) if over_all else (0, 1, 2, 3), tolerance=1e-5)


# -- plain slices, with Megatron's marks -------------------------------------------------------------------------------


def plain_slices(data: int) -> Topology:
    def prepared(model: nn.Module) -> nn.Module:
        """A slice is frozen, and what has terms."""
        for name in ("blocks.0.inner", "blocks.1.norm"):
            model.get_parameter(name).requires_grad_(False)
        return model

    def make(dtype: torch.dtype) -> Job:
        mesh = mesh_of(dp=data, tp=2)
        model = prepared(megatron_cases.make_model(mesh["tp"].get_group(), dtype))

        def backwards(opt: Any, step: int, scaled: Scaled) -> None:
            for micro in range(MICRO):
                with maybe_no_sync(opt, micro < MICRO - 1):
                    loss = megatron_cases.loss_of(model, dist.get_rank() // 2, step, micro, used(step))
                    scaled(loss * overflowing(step)).backward()

        given = {"mesh": mesh["dp"], "tensor_parallel": mesh["tp"]}
        return Job(model, backwards, given, (megatron_cases.Block,), shards=lambda name: data)

    def alone() -> Alone:
        model = prepared(megatron_cases.make_model())

        def backwards(step: int) -> None:
            for micro in range(MICRO):
                for rank in range(data):
                    (megatron_cases.loss_of(model, rank, step, micro, used(step)) / data).backward()

        return model, backwards

    part = lambda rank, name: (name, lambda whole: megatron_cases.slice_of(name, whole, rank % 2, 2))  # noqa: E731
    return Topology(2 * data, make, alone, part=part)


# -- experts -----------------------------------------------------------------------------------------------------------


def experts(*, stacked: bool) -> Topology:
    """Four experts over two ranks, twice: slices of a DTensor, or parameters that other ranks have others of. Without
    tokens they have no gradient: in ``ABSENT`` all of them, and where they aren't stacked some, in the other steps."""
    way = expert_cases.Way(stacked=stacked, starved=not stacked, left_out=ABSENT)

    def prepared(model: expert_cases.Moe) -> expert_cases.Moe:
        for parameter in (model.before.bias, *([model.experts.up] if stacked else [])):
            parameter.requires_grad_(False)
        return model

    def make(dtype: torch.dtype) -> Job:
        mesh, rank, own = expert_cases.make_mesh(), dist.get_rank(), replace(way, dtype=dtype)
        model = prepared(expert_cases.make_model(own, mesh))

        def backwards(opt: Any, step: int, scaled: Scaled) -> None:
            for micro in range(MICRO):
                with maybe_no_sync(opt, micro < MICRO - 1):
                    loss = own.loss(model, rank, step, micro, own.routes(mesh, step))
                    scaled(loss * overflowing(step)).backward()

        groups = expert_cases.groups_of(model, mesh)
        shards = lambda name: 2 if "experts" in name else 4  # noqa: E731
        of = {"experts": mesh["edp"]}
        return Job(model, backwards, groups=groups, shards=shards, spread=not stacked, experts=of)

    def alone() -> Alone:
        model = prepared(expert_cases.make_model(way))

        def backwards(step: int) -> None:
            for micro in range(MICRO):
                for rank in range(4):
                    (way.loss(model, rank, step, micro, way.route(rank, step)) / 4).backward()

        return model, backwards

    def part(rank: int, name: str) -> tuple[str, Callable[[Tensor], Tensor]]:
        place, _, rest = name.removeprefix("experts.").partition(".")
        renamed = f"experts.{2 * (rank % 2) + int(place)}.{rest}" if name.startswith("experts.") and rest else name
        return renamed, lambda whole: whole

    return Topology(4, make, alone, part=part)


# -- pipelines ---------------------------------------------------------------------------------------------------------


def pipeline(schedule: str, data: int = 2) -> Topology:
    """Two ranks in a row, each of ``data``. The first block has a frozen bias, and the last block can be left out. A
    bias of the last rank overflows."""
    count = 2 * pipeline_cases.SCHEDULES[schedule]

    def prepared(blocks: Sequence[nn.Module]) -> Sequence[nn.Module]:
        blocks[0].up.bias.requires_grad_(False)
        return blocks

    def make(dtype: torch.dtype) -> Job:
        mesh = mesh_of(pp=2, dp=data)
        cut = pipeline_cases.Pipeline(schedule, mesh.get_group("pp"), dtype)
        own = nn.ModuleDict({str(number): module for number, module in cut.modules.items()})
        if 0 in cut.modules:
            prepared([cut.modules[0]])
        last = cut.modules.get(count - 1)

        def backwards(opt: Any, step: int, scaled: Scaled) -> None:
            if last is not None:
                last.left_out = step == ABSENT
            cut.scaled = scaled
            x, target = pipeline_cases.batch(step, mesh.get_local_rank("dp"))
            with opt.no_sync():
                cut.forward_backward(x.to(dtype), target)
            if step == OVERFLOW and dist.get_rank() == 2 * data - 1:
                last.up.bias.grad[2] = math.inf

        given, folder = {"mesh": mesh["dp"]}, f"stage-{mesh.get_local_rank('pp')}"
        options = {"pipeline": mesh["pp"]}
        return Job(own, backwards, given, options=options, shards=lambda name: data, folder=folder)

    def alone() -> Alone:
        model = nn.Sequential(*prepared(pipeline_cases.make_blocks(count)))

        def backwards(step: int) -> None:
            model[-1].left_out = step == ABSENT
            for replica in range(data):
                x, target = pipeline_cases.batch(step, replica)
                (pipeline_cases.loss_of(model(x), target) / data).backward()

        return model, backwards

    stages = (0, 1, 2) if "ZeroBubble" in schedule else (0, 1, 2, 3)
    return Topology(2 * data, make, alone, stages, together=data)


class First(nn.Module):
    """Of a GPT, named as in the whole model."""

    def __init__(self, model: tensor_cases.Gpt) -> None:
        super().__init__()
        self.tokens, self.blocks = model.tokens, nn.ModuleDict({"0": model.blocks[0]})

    def forward(self, tokens: Tensor) -> Tensor:
        return self.blocks["0"](self.tokens(tokens))


class Last(nn.Module):
    def __init__(self, model: tensor_cases.Gpt) -> None:
        super().__init__()
        self.blocks, self.norm, self.head = nn.ModuleDict({"1": model.blocks[1]}), model.norm, model.head
        self.left_out = False

    def forward(self, x: Tensor) -> Tensor:
        """Without its block where that is ``left_out``."""
        return self.head(self.norm(x if self.left_out else self.blocks["1"](x)))


def pipeline_of_tensor_parallel_stages() -> Topology:
    """A slice of the last stage is frozen. A slice of the first one overflows, on its last rank alone."""

    def prepared(module: nn.Module) -> nn.Module:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name != "blocks.1.up.weight")
        return module

    def whole() -> tensor_cases.Gpt:
        torch.manual_seed(0)
        return tensor_cases.Gpt()

    def loss_of(out: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1).float(), target.flatten())

    def make(dtype: torch.dtype) -> Job:
        mesh = mesh_of(pp=2, dp=2, tp=2)
        number = mesh.get_local_rank("pp")
        module = tensor_cases.cut_stage((First, Last)[number](whole()).to(dtype), mesh["tp"])
        prepared(module)
        stage = pipelining.PipelineStage(module, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        schedule = pipelining.Schedule1F1B(stage, tensor_cases.BATCH, loss_fn=loss_of)

        def backwards(opt: Any, step: int, scaled: Scaled) -> None:
            module.left_out = number == 1 and step == ABSENT
            schedule._loss_fn = lambda out, target: scaled(loss_of(out, target))
            x, y = tensor_cases.batch(mesh.get_local_rank("dp"), step)
            with opt.no_sync():
                schedule.step(x) if number == 0 else schedule.step(target=y)
            if dist.get_rank() == 3 and step == OVERFLOW:
                module.blocks["0"].up.weight.grad.to_local()[0, 0] = math.inf

        options = {"options": {"pipeline": mesh["pp"]}, "folder": f"stage-{number}"}
        return Job(module, backwards, {"mesh": mesh["dp"]}, (tensor_cases.Block,), shards=lambda name: 2, **options)

    def alone() -> Alone:
        model = prepared(whole())

        def backwards(step: int) -> None:
            for replica in range(2):
                x, y = tensor_cases.batch(replica, step)
                (loss_of(model(x, use=used(step)), y) / 2).backward()

        return model, backwards

    return Topology(8, make, alone, together=4, tolerance=1e-5)


# -- the table ---------------------------------------------------------------------------------------------------------

TOPOLOGIES = {
    "flat": replicated(2, lambda: None, 2, of_each),
    "hybrid": replicated(4, lambda: mesh_of(replicate=2, shard=2), 2, of_each),
    "context parallel": replicated(4, lambda: mesh_of(dp=2, cp=2)["dp", "cp"]._flatten("dp_cp"), 4, of_a_sequence),
    "tensor parallel": tensor_parallel(),
    "tensor parallel, uneven": tensor_parallel(("blocks.0.up.weight",), sequence=False, hidden=5),
    "hybrid × tensor parallel": tensor_parallel(replicas=2),
    "plain slices": plain_slices(2),
    "plain slices alone": plain_slices(1),
    "experts": experts(stacked=False),
    "experts as slices": experts(stacked=True),
    **{f"pipeline, {name.removeprefix('Schedule')}": pipeline(name) for name in pipeline_cases.SCHEDULES},
    "pipeline of two ranks": pipeline("Schedule1F1B", 1),
    "pipeline × tensor parallel": pipeline_of_tensor_parallel_stages(),
    "hybrid, state over all": replicated(
        4, lambda: mesh_of(replicate=2, shard=2), 4, of_each, (1, 2, 3), state_over="all"
    ),
    "hybrid × tensor parallel, state over all": tensor_parallel(replicas=2, over_all=True),
}
