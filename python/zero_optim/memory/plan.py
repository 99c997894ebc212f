"""A rank's memory and traffic, from shapes alone: by the optimizer's own layout, without a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..comm.collectives import Comm
from ..comm.handle import COUNT
from ..comm.sharding import Sharding
from ..comm.topology import STATE_OVER, Grid, TensorRanks, Topology
from ..grads.buckets import BucketKind, buffer_nbytes, layouts_by_size
from ..params.layout import BucketLayout, one_bucket, round_up
from ..rules.codec import Split, StateTensor, default_master
from ..rules.kernel_rule import AdamW
from ..rules.update_rule import MASTER, UpdateRule, stored_for, stored_names
from ..stats import PAGES, FlatBytes, count_bucket, no_memory, state_nbytes
from ..stores.offload import FRAME_ALIGNMENT, FRAMES, Footprint, Offload, Tier, footprint, param_buffers
from .models import ModelShapes, ParameterShape, Width, cut_over, of_stage, spread

LOCAL = "local_gradients"


@dataclass(frozen=True)
class Batch:
    """The batch that a rank computes at a time.

    Attributes:
        sequences, tokens: of a micro-batch, and in each of its sequences.
        checkpointing: a layer keeps its input alone, and is computed again in backward.
    """

    sequences: int
    tokens: int
    checkpointing: bool = False


_ADAMW = {"fp32": AdamW(), "split": AdamW().with_codecs({MASTER: Split()})}
"""By the word for the master, one object each: rules are compared by identity."""


@dataclass(frozen=True)
class Job:
    """The job that is planned: the arguments of ``ShardedOptimizer`` and ``shard_module``, and what they run on.

    Attributes:
        world: ranks.
        tensor: tensor-parallel ranks, over which the model is cut into slices; see ``cut_over``.
        expert_parallel: ranks that the experts of a layer are spread over. Each part of the experts is sharded over
            ``world / expert_parallel`` ranks; see ``spread``.
        pipeline: stages that the model's layers are cut into; see ``of_stage``. Each slice of a stage is on
            ``world / (tensor * pipeline)`` ranks, which average and shard. The fullest stage is planned. All backwards
            of a step are within ``no_sync``.
        replicas: so many of these ranks hold each part of the state: the first dimension of a mesh. The others shard.
        state_over: "all": the replicas shard the state once more, as over all of these ranks. "shard": they do not.
        rank: which of the ranks with one slice is planned, counted row by row in a mesh; None: the mean of all. They
            differ in how much of their shards is padding, and in no sum.
        device: its type, by which buckets have their default size.
        device_memory: bytes of a rank's device, which ``device_budget="auto"`` fills; None: the budget is then 0.
        accumulate: micro-batches in a step, all but the last within ``no_sync``.
        param_offload: at stage 3, where shards of parameters rest: None, "cpu" or "nvme".
        batch: what activations are computed from; None: they are not counted.
        host_waits: whether the host waits for collectives, as under gloo.
        rule: of the parameters whose ``ParameterShape`` has none; None: AdamW with the masters it has by default.
        matrix_rule: of those of them that are matrices of hidden layers; None: ``rule``.
    """

    world: int = 1
    replicas: int = 1
    state_over: str = "shard"
    tensor: int = 1
    expert_parallel: int = 1
    pipeline: int = 1
    stage: int = 2
    rank: int | None = None
    bucket_cap_mb: float | None = None
    grad_reduce_dtype: torch.dtype | None = None
    grad_accumulation_dtype: torch.dtype | None = None
    offload: Offload = Offload()
    device: str = "cuda"
    device_memory: int | None = None
    prefetch: int = 1
    reshard_after_forward: bool | int = True
    accumulate: int = 1
    param_offload: str | None = None
    batch: Batch | None = None
    host_waits: bool = False
    rule: UpdateRule | None = None
    matrix_rule: UpdateRule | None = None

    def rule_of(self, parameter: ParameterShape) -> UpdateRule:
        """Choose the rule that updates the parameter."""
        own = self.matrix_rule if parameter.matrix else None
        return parameter.rule or own or self.rule or _ADAMW[default_master([parameter.dtype])]

    @property
    def data(self) -> int:
        """Ranks that gradients are averaged over."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def adds_up(self) -> bool:
        """Whether gradients of several backwards add up on a rank before they are reduced."""
        return self.accumulate > 1 or self.pipeline > 1

    @property
    def params_off_device(self) -> bool:
        """Whether shards of parameters rest in host memory or on a disk."""
        return self.stage >= 3 and self.param_offload is not None


@dataclass(frozen=True)
class Plan:
    """Bytes of a rank.

    Attributes:
        memory: on the device while a backward runs, by the kinds of ``stats()["memory"]``: ``parameters`` with frozen
            ones and buffers; ``unsharded``, the root and the largest run of units gathered together; of offloaded state
            ``pages``, what stays on the device. And ``local_gradients`` of buckets that have not left yet, and
            ``activations``, 0 where no batch was given.
        first_step: bytes more in the first backward at stage 0 of several ranks. It observes the order in which
            gradients become ready, so no bucket leaves before its end, and all gradients are local.
        host, disk: of what is offloaded.
        traffic: bytes of whole tensors that a step communicates for data parallelism, by collective, as
            ``stats()["collectives"]`` counts. What tensor parallelism and a pipeline send is not in it.
        calls: how many collectives that is, by kind; 0 of ``all_to_all``, where it is not known.
        buckets: how many there are.
        state_kinds: the kinds of the model's state: parameters, gradients and optimizer state.
        pipeline_stage: the planned stage of the pipeline, from 0: that with the most memory.
    """

    model: ModelShapes
    job: Job
    memory: Mapping[str, int]
    first_step: int
    host: int
    disk: int
    traffic: Mapping[str, int]
    calls: Mapping[str, int]
    buckets: int
    state_kinds: tuple[str, ...]
    pipeline_stage: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device while a backward runs."""
        return sum(self.memory.values())

    @property
    def most(self) -> int:
        """Bytes on the device at most, the first step included."""
        return self.total + self.first_step

    @property
    def communicators(self) -> int:
        """NCCL communicators that a rank connects, but for those of experts and of the program's other groups."""
        job, shards = self.job, self.job.data // self.job.replicas
        if job.world == job.pipeline:
            return int(job.pipeline > 1)
        # The optimizer's own group and its parts; a sharded model has as many, and one of the ranks that keep a unit.
        own = 1 + 2 * (job.tensor > 1) + 2 * (job.replicas > 1 and job.stage >= 1)
        of_model = own + (1 < job.reshard_after_forward < shards) if job.stage == 3 else 0
        return 1 + own + of_model + (job.pipeline > 1)  # the first is of the group that is given

    @property
    def model_state(self) -> int:
        """Bytes of parameters, gradients and state, without padding: what the table of the ZeRO paper has."""
        return sum(self.memory[kind] for kind in self.state_kinds)


@dataclass(frozen=True)
class _Flat:
    """A flat tensor of parameters, as it would be laid out."""

    layout: BucketLayout
    dtype: torch.dtype
    trained: bool
    sharding: Sharding
    rule: UpdateRule

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    @property
    def local_nbytes(self) -> int:
        """Bytes of this rank's own gradients."""
        return self.layout.numel * self.sharding.local_dtype(self.dtype).itemsize

    @property
    def params_layout(self) -> BucketLayout:
        """At stage 3: a shard of parameters may have several of state."""
        return replace(self.layout, shards=self.layout.shards // self.sharding.parts_of_shard)

    @property
    def shard_nbytes(self) -> int:
        return self.layout.shard_numel * self.dtype.itemsize


@dataclass(frozen=True)
class _Laid:
    """All flat tensors: of each unit at stage 3, the root's first; of the model as a whole at the others."""

    job: Job
    sharding: Sharding
    units: Sequence[Sequence[_Flat]]

    @property
    def flats(self) -> list[_Flat]:
        return [flat for unit in self.units for flat in unit]

    @property
    def buckets(self) -> list[_Flat]:
        return [flat for flat in self.flats if flat.trained]


class _AbsentComm(Comm):
    """The ranks of a plan, which do not exist."""

    def __init__(self, world: int, rank: int) -> None:
        super().__init__(None)
        self.world_size, self.rank = world, rank


def plan(model: ModelShapes, job: Job) -> Plan:
    """Plan what a rank of ``job`` holds and communicates. Raises ValueError for a job that cannot be."""
    _check(model, job)
    # The first two stages have as many layers as any, and keep most micro-batches. The last has the head.
    stages = sorted({0, min(1, job.pipeline - 1), job.pipeline - 1})
    return max((_plan_stage(model, job, stage) for stage in stages), key=lambda made: made.most)


def _plan_stage(whole: ModelShapes, job: Job, stage: int) -> Plan:
    model = of_stage(whole, job.pipeline, stage)
    laid = _lay_out(spread(cut_over(model, job.tensor), job.expert_parallel, job.data, job.rank or 0), job)
    buckets = laid.buckets
    rules = dict.fromkeys(flat.rule for flat in buckets)
    on_device = job.offload.tier is Tier.DEVICE and not job.params_off_device
    memory = no_memory(rules)
    _count_flats(memory, laid, state=on_device)
    memory["parameters"] += model.buffers
    memory["communication"] = _communication(laid)
    if job.stage >= 3:
        memory["unsharded"] = _unsharded(laid)
    memory[LOCAL] = _local_gradients(laid)
    memory["activations"] = 0
    # By the schedule 1F1B a stage runs a forward for each stage behind it, and one of its own, before its first
    # backward: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters" (2021), 2.2.1.
    in_flight = min(job.pipeline - stage, job.accumulate) if job.pipeline > 1 else 1
    if job.batch is not None and model.width is not None:
        itemsize = max((parameter.dtype.itemsize for parameter in model.parameters), default=2)
        head = stage == job.pipeline - 1
        activations = activation_bytes(model.width, job.batch, itemsize, in_flight=in_flight, head=head)
        memory["activations"] = activations // job.tensor  # by sequence parallelism each rank keeps an equal part
    all_local = buckets if laid.sharding.reduces and job.stage == 0 else []
    first_step = max(0, sum(flat.local_nbytes for flat in all_local) - memory[LOCAL])
    foot = _place_state(laid, others=sum(memory.values()) + first_step)
    if not on_device:
        memory[PAGES] = foot.device
    away = laid.flats if job.params_off_device else []
    shards, host, disk = [of.params_layout.shard_numel * of.dtype.itemsize for of in away], foot.host, foot.disk
    if job.param_offload == Tier.NVME.value:
        host, disk = host + param_buffers(job.prefetch) * max(shards, default=0), disk + sum(shards)
    else:
        host += sum(shards)
    kinds = ("parameters", "gradients", *dict.fromkeys(name for rule in rules for name in stored_names(rule)))
    calls, traffic = ({kind: pair[of] for kind, pair in _traffic(laid, in_flight).items()} for of in (0, 1))
    return Plan(whole, job, memory, first_step, host, disk, traffic, calls, len(buckets), kinds, stage)


def _check(model: ModelShapes, job: Job) -> None:
    def check(fine: bool, what: str) -> None:
        if not fine:
            raise ValueError(what)

    def check_divides(field: str, value: int, ranks: int, alike: str = "") -> None:
        check(value >= 1 and ranks % value == 0, f"{field} must divide the {ranks} ranks{alike}, got {value!r}")

    check(job.stage in (0, 1, 2, 3), f"stage must be 0, 1, 2 or 3, got {job.stage!r}")
    check(job.world >= 1, f"world must be 1 rank or more, got {job.world!r}")
    check_divides("tensor", job.tensor, job.world)
    check_divides("pipeline", job.pipeline, job.world // job.tensor, " with the same slices")
    check_divides("expert_parallel", job.expert_parallel, job.data)
    check(1 in (job.tensor, job.expert_parallel), "expert_parallel beside tensor-parallel ranks is not planned")
    divides = job.replicas >= 1 and job.data % job.replicas == 0 and (job.replicas < job.data or job.data == 1)
    check(divides, f"replicas must divide the {job.data} ranks and leave several to shard; got {job.replicas!r}")
    check(job.state_over in STATE_OVER, f"state_over must be one of {STATE_OVER}, got {job.state_over!r}")
    check(job.rank is None or 0 <= job.rank < job.data, f"rank must be one of {job.data}, got {job.rank!r}")
    check(job.stage < 3 or bool(model.units), "stage 3 is planned by units, and none are known: name their class")
    check(job.batch is None or bool(model.width), "activations need a config with layers, width and vocabulary")


# -- the layout --------------------------------------------------------------------------------------------------------


def _lay_out(model: ModelShapes, job: Job) -> _Laid:
    rank, shards, grid = job.rank or 0, job.data // job.replicas, None
    if job.replicas > 1 and job.stage >= 1:
        ranks = _AbsentComm(shards, rank % shards), _AbsentComm(job.replicas, rank // shards)
        grid = Grid(*ranks, over_all=job.state_over == "all")
    sharding = Sharding(
        _AbsentComm(job.data, rank),
        job.stage,
        job.grad_reduce_dtype,
        torch.device(job.device),
        grid,
        topology=Topology(over_all=job.state_over == "all"),
        grad_accumulation_dtype=job.grad_accumulation_dtype,
    )
    if job.stage >= 3:
        return _Laid(job, sharding, [list(_of_unit(model, unit, sharding, job)) for unit in model.units])
    return _Laid(job, sharding, _by_size(model, sharding, job))


def _sharding_of(parameter: ParameterShape, main: Sharding) -> Sharding:
    if parameter.shard_group is None:
        return main
    ranks = TensorRanks(_AbsentComm(*parameter.shard_group), _AbsentComm(1, 0))
    return replace(main, grid=None, tensor_ranks=ranks, grad_divisor=1)


def _by_size(model: ModelShapes, sharding: Sharding, job: Job) -> list[list[_Flat]]:
    """Lay out buckets as ``buckets_by_size`` does."""
    parameters = model.parameters
    every = range(len(parameters))[::-1] if model.order is None else model.order
    order = [index for index in every if parameters[index].trained]
    rooms = {index: parameters[index].room for index in order}
    numels = {index: parameters[index].numel for index in order}
    shardings = {p.shard_group: _sharding_of(p, sharding) for p in parameters}
    kinds, costs = {}, {}
    for index in order:
        p, rule = parameters[index], job.rule_of(parameters[index])
        kinds[index] = BucketKind(p.dtype, p.cut, shardings[p.shard_group], rule)
        if p.shape is not None:
            costs[index] = rule.cost(p.shape)
    layouts = layouts_by_size(rooms, kinds, job.bucket_cap_mb, order, costs)
    flats = [_Flat(layout.holding(numels), of.dtype, True, of.sharding, of.rule) for layout, of in layouts]
    frozen = [p for p in parameters if not p.trained]  # each alone: in no bucket, so without padding
    alone = [_Flat(BucketLayout((), 1, p.numel), p.dtype, False, sharding, job.rule_of(p)) for p in frozen]
    return [flats, alone]


def _of_unit(model: ModelShapes, unit: Sequence[int], main: Sharding, job: Job) -> Iterator[_Flat]:
    """Lay out a unit: by dtype, cut and trained, as ``shard_module`` does, and by the rules of the optimizer."""
    kinds: dict[tuple[torch.dtype, bool, bool, UpdateRule], list[ParameterShape]] = {}
    for parameter in (model.parameters[index] for index in unit):
        sharding = _sharding_of(parameter, main)  # one for the unit
        kind = parameter.dtype, parameter.cut, parameter.trained, job.rule_of(parameter)
        kinds.setdefault(kind, []).append(parameter)
    for (dtype, _, trained, rule), of_kind in kinds.items():
        layout = one_bucket([parameter.room for parameter in of_kind], sharding.shard_count)
        numels = {number: parameter.numel for number, parameter in enumerate(of_kind)}
        yield _Flat(layout.holding(numels), dtype, trained, sharding, rule)


# -- on the device -----------------------------------------------------------------------------------------------------


def _count_flats(memory: dict[str, int], laid: _Laid, *, state: bool) -> None:
    """Count parameters and gradients, and ``state``."""
    job = laid.job
    for flat in laid.flats:
        layout = flat.layout
        if not flat.trained and job.stage < 3:
            memory["parameters"] += flat.nbytes
            continue
        if not job.params_off_device:
            of_params, itemsize = flat.params_layout if job.stage >= 3 else layout, flat.dtype.itemsize
            numel = of_params.shard_numel if job.stage >= 3 else layout.numel
            _count_flat(memory, flat, of_params, [FlatBytes("parameters", numel, itemsize)], (), job)
        if flat.trained:
            numel = layout.numel if flat.sharding.keeps_full_gradients else layout.shard_numel
            held = [FlatBytes("gradients", numel, flat.sharding.grad_dtype(flat.dtype).itemsize)]
            _count_flat(memory, flat, layout, held, stored_for(flat.rule, flat.dtype) if state else (), job)


def _count_flat(
    memory: dict[str, int],
    flat: _Flat,
    layout: BucketLayout,
    held: Sequence[FlatBytes],
    stored: Sequence[StateTensor],
    job: Job,
) -> None:
    if job.rank is None:  # the pieces of all ranks together, of which the mean is counted
        pieces = list(replace(layout, shards=1).pieces(0))
        count_bucket(memory, layout, pieces, held, stored, ranks=layout.shards)
    else:
        shard = flat.sharding.shard_index * layout.shards // flat.layout.shards
        count_bucket(memory, layout, list(layout.pieces(shard)), held, stored)


def _communication(laid: _Laid) -> int:
    job, sharding = laid.job, laid.sharding
    sizes = [buffer_nbytes([(flat.layout.numel, flat.dtype)], sharding) for flat in laid.buckets]
    if job.stage < 3:
        return COUNT * max(sizes, default=0)
    # Under gloo one reduction waits for the one before: there is one buffer, and what other ranks send of the bucket.
    # One part of that the shard itself receives, if its dtype is that.
    if job.host_waits and sharding.reduces:
        # With state over all ranks that is a sum within the row, which stays in the buffer until the second leg.
        received_there = all(sharding.grad_dtype(of.dtype) == sharding.reduce_dtype(of.dtype) for of in laid.buckets)
        received_there &= sharding.parts_of_shard == 1
        counts = [(size, flat.params_layout.shards) for size, flat in zip(sizes, laid.buckets, strict=True)]
        return max((size + size * max(0, n - 1 - received_there) // n for size, n in counts), default=0)
    return sum(sorted(sizes)[-COUNT:])  # a buffer gets memory as a bucket takes it, so there are the two largest


def _unsharded(laid: _Laid) -> int:
    """Count whole units: the root, the largest run of a unit and those gathered ahead, and all that are kept."""
    if not laid.sharding.reduces:
        return 0
    root, *units = (sum(flat.nbytes for flat in unit if flat.layout.shards > 1) for unit in laid.units)
    kept = sum(flat.nbytes // n for unit in laid.units[1:] for flat in unit if (n := _keepers(flat, laid.job)))
    ahead = max((sum(units[run]) for run in _runs(laid, laid.job.prefetch)), default=0)
    return root + kept + (ahead if kept < sum(units) else 0)


def _of_experts(unit: Sequence[_Flat]) -> bool:
    return any(flat.sharding.of_experts for flat in unit)


def _runs(laid: _Laid, ahead: int) -> Iterator[slice]:
    """List the units, behind the root, that are there together: one, the experts that follow it, and others ahead."""
    others = [number for number, unit in enumerate(laid.units[1:]) if not _of_experts(unit)]
    for first in range(len(laid.units) - 1):
        yield slice(first, next((number for number in others if number > first), len(laid.units)) + ahead)


def _keepers(flat: _Flat, job: Job) -> int:
    """Count the ranks that together keep it between forward and backward: 1: each keeps all; 0: none does."""
    reshard, shards = job.reshard_after_forward, flat.params_layout.shards
    if isinstance(reshard, bool):
        return int(not reshard and shards > 1)
    return reshard if reshard < shards else 0  # over all shards: the same as True


def _local_gradients(laid: _Laid) -> int:
    if laid.job.adds_up and not laid.sharding.keeps_full_gradients:  # micro-batches add up beside the shard
        return sum(flat.local_nbytes for flat in laid.buckets if not flat.sharding.keeps_full_gradients)
    if laid.job.stage < 3 or not laid.sharding.reduces:
        return max((flat.local_nbytes for flat in laid.buckets), default=0)
    root, *units = (sum(flat.local_nbytes for flat in unit if flat.trained) for unit in laid.units)
    return root + max((sum(units[run]) for run in _runs(laid, 0)), default=0)  # the root's backward ends last


def activation_bytes(width: Width, batch: Batch, itemsize: int, *, in_flight: int = 1, head: bool = True) -> int:
    """Count the bytes that a decoder transformer keeps for backward, at most at a time.

    ``in_flight``: micro-batches whose backward is to come. ``head``: whether norm and head are on this rank.

    By Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 4.1: in 16
    bits a layer keeps 34·s·b·h for s tokens, b sequences and width h (flash attention keeps no matrix of [s, s]), and
    norm, head and fp32 logits 4·s·b·h·(1 + v/h) for v rows of the head. With ``checkpointing`` a layer keeps its input,
    and one layer the rest. It is an estimate: a model without dropout or with another MLP keeps something else.
    """
    positions = batch.sequences * batch.tokens
    layer_input = positions * width.hidden * itemsize
    layer = positions * width.hidden * (16 * itemsize + 2)
    after = 2 * layer_input + 4 * positions * width.vocabulary if head else 0
    if batch.checkpointing:
        return in_flight * (width.layers * layer_input + after) + layer
    return in_flight * (width.layers * layer + after)


# -- off the device ----------------------------------------------------------------------------------------------------


def _place_state(laid: _Laid, *, others: int) -> Footprint:
    """Count what the state takes of each memory. ``others``: bytes of all else on the device."""
    job, sharding, buckets = laid.job, laid.sharding, laid.buckets
    # In a page that a store moves, tensors are aligned.
    moved = job.offload.tier in (Tier.PAGED, Tier.NVME) or (job.offload.tier is Tier.DEVICE and job.params_off_device)
    unit = FRAME_ALIGNMENT if moved else 1
    pages = [
        sum(round_up(state_nbytes(state, flat.layout), unit) for state in stored_for(flat.rule, flat.dtype))
        for flat in buckets
    ]
    visiting = [flat.shard_nbytes for flat in buckets] if job.params_off_device else []
    left = max(0, (job.device_memory or 0) - others)
    room = left if sum(pages) <= left else max(0, left - FRAMES * max(pages, default=0))
    mirrors = sum(flat.layout.shard_numel * sharding.grad_dtype(flat.dtype).itemsize for flat in buckets)
    mirrors += 0 if job.params_off_device else sum(flat.shard_nbytes for flat in buckets)
    return footprint(job.offload, pages, mirrors, visiting, room=room)


# -- what is communicated ----------------------------------------------------------------------------------------------


def _traffic(laid: _Laid, in_flight: int) -> dict[str, tuple[int, int]]:
    """Count collectives of a step, and their bytes, by kind. ``in_flight``: forwards before the first backward."""
    job, sharding, buckets = laid.job, laid.sharding, laid.buckets

    traffic: dict[str, tuple[int, int]] = {}

    def count(kind: str, nbytes: int, times: int = 1) -> None:
        calls, before = traffic.get(kind, (0, 0))
        traffic[kind] = calls + times, before + times * nbytes

    for flat in buckets if sharding.reduces else ():
        grid, shards = flat.sharding.grid, flat.layout.shards
        reduced = flat.layout.numel * flat.sharding.reduce_dtype(flat.dtype).itemsize
        count("reduce_scatter" if shards > 1 else "all_reduce", reduced)
        if grid is not None and grid.over_all:
            count("replica_reduce_scatter", reduced * job.replicas // shards)
            count("replica_all_gather", flat.nbytes * job.replicas // shards)
        elif grid is not None:
            count("all_reduce", reduced // shards)
        if job.stage < 3 and shards > 1:
            count("all_gather", flat.nbytes)
    if job.stage < 3 or not sharding.reduces:
        return traffic
    for flat in laid.flats:
        if flat.layout.shards > 1:
            count("all_gather", flat.nbytes, job.accumulate)
    units = laid.units[1:]
    last = max((number for number, unit in enumerate(units) if not _of_experts(unit)), default=len(units))
    for number, unit in enumerate(units):
        # Backward begins with the root, which stays, and with the last unit, which stays until another forward begins.
        times = in_flight - 1 if number == last else job.accumulate
        for flat in [flat for flat in unit if flat.layout.shards > 1 and times]:
            if (keepers := _keepers(flat, job)) != 1:
                count("node_all_gather" if keepers else "all_gather", flat.nbytes, times)
    joining = [flat for flat in buckets if flat.rule.joins_parts and flat.layout.shards > 1]
    joined = sum(slot.numel // flat.layout.shards for flat in joining for slot in flat.layout.slots)
    if joined:  # matrices are sent to one rank each, and back
        traffic["all_to_all"] = 0, 2 * joined * torch.bfloat16.itemsize
    return traffic
