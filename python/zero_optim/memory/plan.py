"""A rank's memory and traffic, from shapes alone: by the optimizer's own layout, without a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch

from ..comm.buffers import COUNT
from ..comm.collectives import Comm
from ..comm.grid import Grid
from ..comm.sharding import Sharding
from ..comm.tensor_ranks import TensorRanks
from ..grads.buckets import BucketKind, buffer_nbytes, layouts_by_size
from ..params.layout import BucketLayout, SlotPiece, one_bucket, round_up
from ..rules.adamw import AdamW
from ..rules.homes import REPLICA_ALL_REDUCE, TENSOR_ALL_TO_ALL, Size, batch_lengths
from ..rules.muon import ON_A_GPU, ON_A_PROCESSOR
from ..rules.state_tensor import StateTensor
from ..rules.update_rule import UpdateRule, has_master, stored_for, stored_names
from ..stats import PAGES, TELEMETRY, FlatBytes, count_bucket, no_memory, row_stats_nbytes, state_nbytes
from ..stores.offload import FRAME_ALIGNMENT, FRAMES, Footprint, Offload, Tier, footprint
from .activations import Batch, activation_bytes, in_flight
from .shapes import ModelShapes, ParameterShape, cut_over, of_stage

ON_THE_HOST = 2**63
"""The device memory of a CPU: the host's, taken as without limit."""

LOCAL = "local_gradients"
MATRICES = "whole_matrices"
_ITERATION = 10
"""Bytes that an element of a matrix takes while it is made orthogonal: fp32, and three copies in bf16."""
TERMS = "tensor_parallel"
"""The kind of traffic that adds up terms over tensor-parallel ranks."""

_ACROSS = ("all_reduce", REPLICA_ALL_REDUCE)
_ON_WIRE = {"reduce_scatter": 1, "all_gather": 1, "node_all_gather": 1, "all_to_all": 1, **dict.fromkeys(_ACROSS, 2)}


@dataclass(frozen=True)
class Job:
    """The job that is planned: the arguments of ``ShardedOptimizer`` and ``shard_module``, and what they run on.

    Attributes:
        world: ranks.
        tensor: tensor-parallel ranks, over which the model is cut into slices; see ``cut_over``.
        pipeline: stages that the model's layers are cut into; see ``of_stage``. Each slice of a stage is on
            ``world / (tensor * pipeline)`` ranks, which average and share. The fullest stage is planned. All backwards
            of a step are within ``no_sync``.
        replicas: so many of these ranks hold each part of the state: the first dimension of a mesh. The others share.
        rank: which of the ranks with one slice is planned, counted row by row in a mesh; None: the mean of all. They
            differ in how much of their shards is padding, and in no sum.
        device_memory: bytes of a rank's device, which ``device_budget="auto"`` fills; None: the budget is then 0.
        accumulate: micro-batches in a step, all but the last within ``no_sync``.
        param_offload: at stage 3, whether shards of parameters rest in host memory.
        batch: what activations are computed from; None: they are not counted.
        host_waits: whether the host waits for collectives, as under gloo.
        rule: of the parameters whose ``ParameterShape`` has none.
        matrix_rule: of those of them that are matrices of hidden layers; None: ``rule``.
        telemetry: whether the optimizer measures its rows.
    """

    world: int = 1
    replicas: int = 1
    tensor: int = 1
    pipeline: int = 1
    stage: int = 2
    rank: int | None = None
    bucket_cap_mb: float | None = None
    grad_reduce_dtype: torch.dtype | None = None
    grad_accumulation_dtype: torch.dtype | None = None
    offload: Offload = Offload()
    device_memory: int | None = None
    prefetch: int = 1
    reshard_after_forward: bool | int = True
    accumulate: int = 1
    param_offload: bool = False
    batch: Batch | None = None
    host_waits: bool = False
    rule: UpdateRule = AdamW()
    matrix_rule: UpdateRule | None = None
    telemetry: bool = False

    def rule_of(self, parameter: ParameterShape) -> UpdateRule:
        """Choose the rule that updates the parameter."""
        own = self.matrix_rule if parameter.matrix else None
        return parameter.rule or own or self.rule

    @property
    def data(self) -> int:
        """Ranks that gradients are averaged over."""
        return self.world // (self.tensor * self.pipeline)

    @property
    def adds_up(self) -> bool:
        """Whether gradients of several backwards add up on a rank before they are reduced."""
        return self.accumulate > 1 or self.pipeline > 1

    @property
    def params_on_host(self) -> bool:
        """Whether shards of parameters rest in host memory."""
        return self.stage >= 3 and self.param_offload


@dataclass(frozen=True)
class Plan:
    """Bytes of a rank.

    Attributes:
        memory: on the device while a backward runs, by the kinds of ``stats()["memory"]``, and by

            - ``parameters``: frozen ones and the modules' buffers, too, where they are known;
            - ``local_gradients``: what autograd has computed of buckets that have not left yet;
            - ``activations``: by the formula of ``activation_bytes``; 0 where no batch was given;
            - ``unsharded``: at stage 3, the root, and the largest run of a unit and those gathered ahead, whole;
            - ``whole_matrices``: what an update of whole matrices takes beyond a backward's activations, units and
              local gradients, which are gone by then;
            - ``telemetry``: where the optimizer has it, what each update measures;
            - ``pages``: of offloaded state, the pages that stay on the device, and the frames for the others; the kinds
              of the state are 0 then.
        first_step: bytes more in the first backward at stages 0 to 2 of several ranks. It observes the order in which
            gradients become ready, so no bucket leaves before its end, and all gradients are local.
        host, disk: of what is offloaded.
        traffic: bytes of whole tensors that a step communicates, by collective, as ``stats()["collectives"]`` counts.
        sent_along_slices: bytes that a rank sends to the tensor-parallel ranks beside it: terms of gradients, slices
            for a rule that needs whole parameters, and, where there is a batch, what layers send.
        sent_along_pipeline: bytes that it sends to the stages before and behind it; 0 where no batch was given.
        pipeline_stage: the planned stage of the pipeline, from 0: that with the most memory.
        buckets: how many there are.
        asleep: on the device between ``sleep()`` and ``wake()``: parameters, and modules' buffers.
        asleep_with_parameters: the same of ``sleep(parameters=True)``: frozen ones at stages 0 to 2, modules' buffers.
        state_kinds: which of the kinds are of the model's state, ZeRO's word for parameters, gradients and optimizer
            state.
    """

    model: ModelShapes
    job: Job
    memory: Mapping[str, int]
    first_step: int
    host: int
    disk: int
    traffic: Mapping[str, int]
    buckets: int
    state_kinds: tuple[str, ...]
    sent_along_slices: int = 0
    sent_along_pipeline: int = 0
    pipeline_stage: int = 0
    asleep: int = 0
    asleep_with_parameters: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device while a backward runs."""
        return sum(self.memory.values())

    @property
    def most(self) -> int:
        """Bytes on the device at most, the first step included."""
        return self.total + self.first_step

    @property
    def model_state(self) -> int:
        """Bytes of parameters, gradients and state, without padding: what the table of the ZeRO paper has."""
        return sum(self.memory[kind] for kind in self.state_kinds)

    @property
    def communicated(self) -> int:
        """Bytes that a rank sends in a step over all links, and about as many that it receives."""
        return self.sent_within + self.sent_across + self.sent_along_slices + self.sent_along_pipeline

    @property
    def sent_within(self) -> int:
        """Bytes sent to ranks that share with it: (N-1)/N of whole tensors, and twice that of an all-reduce."""
        return self._sent(self.job.data // self.job.replicas, across=False)

    @property
    def sent_across(self) -> int:
        """Bytes sent to ranks that repeat what it has: 2 (N-1)/N of its shards, and of the matrices whose work they
        share. 0 without such ranks."""
        return self._sent(self.job.replicas, across=True)

    def _sent(self, ranks: int, *, across: bool) -> int:
        on_grid = self.job.replicas > 1 and self.job.stage >= 1
        of_shares = {kind: nbytes for kind, nbytes in self.traffic.items() if kind in _ON_WIRE}
        kinds = {kind: nbytes for kind, nbytes in of_shares.items() if (on_grid and kind in _ACROSS) is across}
        ranks = ranks if on_grid else self.job.data
        return sum(_ON_WIRE[kind] * nbytes for kind, nbytes in kinds.items()) * (ranks - 1) // ranks


@dataclass(frozen=True)
class _Flat:
    """A flat tensor of parameters, as it would be laid out.

    Attributes:
        joined: elements of slices that are made whole for its rule.
        slices: ranks that have these slices.
    """

    layout: BucketLayout
    dtype: torch.dtype
    trained: bool
    sharding: Sharding
    rule: UpdateRule
    joined: int = 0
    slices: int = 1

    def is_joined(self, job: Job) -> bool:
        """Tell whether its update makes parameters whole that are cut over ranks."""
        over_shards = job.stage >= 3 and self.layout.shards > 1
        return not self.rule.layout.cuts and (over_shards or bool(self.joined))

    def is_shared(self, job: Job) -> bool:
        """Tell whether replicas share the work of its update: of state on the device, or of joined parameters."""
        shares = self.rule.shares_work and (self.is_joined(job) or job.offload.tier is Tier.DEVICE)
        return shares and self.sharding.replicas is not None

    @property
    def nbytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    @property
    def shard_nbytes(self) -> int:
        return self.layout.shard_numel * self.dtype.itemsize


@dataclass(frozen=True)
class _Laid:
    """All flat tensors: of each unit at stage 3, the root's first; of the model as a whole at the others."""

    units: list[list[_Flat]] = field(default_factory=list)

    @property
    def flats(self) -> list[_Flat]:
        return [flat for unit in self.units for flat in unit]

    @property
    def buckets(self) -> list[_Flat]:
        return [flat for flat in self.flats if flat.trained]


class _AbsentComm(Comm):
    """The ranks of a plan, which do not exist: their count, and one's number."""

    def __init__(self, world: int, rank: int) -> None:
        super().__init__(None)
        self.world_size, self.rank = world, rank


def _sharding_of(job: Job) -> Sharding:
    rank, shards = job.rank or 0, job.data // job.replicas
    grid = None
    if job.replicas > 1 and job.stage >= 1:
        grid = Grid(_AbsentComm(shards, rank % shards), _AbsentComm(job.replicas, rank // shards))
    everyone = _AbsentComm(job.data, rank)
    return Sharding(
        everyone,
        job.stage,
        job.grad_reduce_dtype,
        torch.device("meta"),
        grid,
        grad_accumulation_dtype=job.grad_accumulation_dtype,
    )


def _sharding_of_experts(main: Sharding, sharers: tuple[int, int]) -> Sharding:
    """Say who shares experts. ``sharers``: see ``ParameterShape``."""
    ranks = TensorRanks(_AbsentComm(*sharers), _AbsentComm(1, 0))
    return replace(main, grid=None, tensor_ranks=ranks, grad_divisor=1)


def plan(model: ModelShapes, job: Job) -> Plan:
    """Plan what a rank of ``job`` holds and communicates. Raises ValueError for a job that cannot be."""
    _check(model, job)
    # The first two stages have as many layers as any, and keep most micro-batches. The last has the head.
    stages = sorted({0, min(1, job.pipeline - 1), job.pipeline - 1})
    made = [_plan_stage(model, job, stage) for stage in stages]
    return max(made, key=lambda of_stage: of_stage.most)


def _plan_stage(whole: ModelShapes, job: Job, stage: int) -> Plan:
    """Plan one ``stage`` of the pipeline."""
    sharding = _sharding_of(job)
    model = of_stage(whole, job.pipeline, stage)
    cut = cut_over(model, job.tensor)
    laid = _lay_out(cut, job, sharding)
    # In a page that a store moves, tensors are aligned.
    moved = job.offload.tier in (Tier.PAGED, Tier.NVME) or (job.offload.tier is Tier.DEVICE and job.params_on_host)
    unit = FRAME_ALIGNMENT if moved else 1
    pages = [
        sum(round_up(state_nbytes(state, flat.layout), unit) for state in stored_for(flat.rule, flat.dtype))
        for flat in laid.buckets
    ]
    rules = dict.fromkeys((job.rule, *(flat.rule for flat in laid.buckets)))
    memory = no_memory(rules)
    _count_flats(memory, laid, job)
    memory["parameters"] += model.buffers
    memory["communication"] = _communication(laid, job, sharding)
    if job.stage >= 3:
        memory["unsharded"] = _unsharded(laid, job, sharding)
    memory[LOCAL] = _local_gradients(laid, job, sharding)
    memory["activations"] = _activations(model, job, stage)
    gone = sum(memory.get(kind, 0) for kind in ("unsharded", LOCAL, "activations"))
    memory[MATRICES] = max(0, _in_update(laid, job, sharding) - gone)
    measured = sum(row_stats_nbytes(flat.layout) for flat in laid.buckets) if job.telemetry else 0
    if job.telemetry:
        memory[TELEMETRY] = 0 if job.offload.tier is Tier.CPU else measured
    every = sum(flat.nbytes for flat in laid.buckets)
    learns = sharding.reduces and job.stage < 3
    first_step = every - memory[LOCAL] if learns else 0
    foot = _place_state(pages, laid, job, sharding, others=sum(memory.values()) + first_step)
    if job.offload.tier is Tier.DEVICE and not job.params_on_host:
        for flat in laid.buckets:
            _count(memory, flat, (), job, stored_for(flat.rule, flat.dtype))
    else:
        memory[PAGES] = foot.device
    host = foot.host + (sum(flat.shard_nbytes for flat in laid.flats) if job.params_on_host else 0)
    host += measured if job.offload.tier is Tier.CPU else 0
    kinds = ("parameters", "gradients", *dict.fromkeys(name for rule in rules for name in stored_names(rule)))
    traffic = _traffic(laid, job, sharding)
    if any(flat.joined for flat in laid.buckets):
        traffic[TENSOR_ALL_TO_ALL] = _there_and_back(flat.joined // flat.sharding.shard_count for flat in laid.buckets)
    if shared := [flat for flat in laid.buckets if flat.is_shared(job)]:
        elements = (sum(slot.numel for slot in flat.layout.slots) // flat.layout.shards for flat in shared)
        traffic[REPLICA_ALL_REDUCE] = torch.bfloat16.itemsize * sum(elements)
    if job.tensor > 1:
        traffic[TERMS] = _terms(cut, job)
    return Plan(
        whole,
        job,
        memory,
        first_step,
        host,
        foot.disk,
        traffic,
        len(laid.buckets),
        kinds,
        sent_along_slices=_along_slices(model, job, traffic),
        sent_along_pipeline=_along_pipeline(model, job, stage),
        pipeline_stage=stage,
        asleep=model.buffers + _parameters_of(laid.flats, job),
        asleep_with_parameters=model.buffers + _parameters_of([f for f in laid.flats if _stays(f, job)], job),
    )


def _check(model: ModelShapes, job: Job) -> None:
    if job.stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, got {job.stage!r}")
    if job.world < 1:
        raise ValueError(f"world must be 1 rank or more, got {job.world!r}")
    if job.tensor < 1 or job.world % job.tensor:
        raise ValueError(f"tensor must be a divisor of the {job.world} ranks, got {job.tensor!r}")
    if job.pipeline < 1 or job.world // job.tensor % job.pipeline:
        raise ValueError(
            f"pipeline must be a divisor of the {job.world // job.tensor} ranks that have the same slices, got "
            f"{job.pipeline!r}"
        )
    if job.replicas < 1 or job.data % job.replicas or job.replicas == job.data > 1:
        raise ValueError(
            f"replicas must be a divisor of the {job.data} ranks, and leave several that share; got {job.replicas!r}"
        )
    if job.rank is not None and not 0 <= job.rank < job.data:
        raise ValueError(f"rank must be one of {job.data}, got {job.rank!r}")
    if job.stage == 3 and not model.units:
        raise ValueError("stage 3 is planned by units, and those of the model are not known: name their class")
    if job.batch is not None and model.width is None:
        raise ValueError(
            "activations are computed from a decoder's layers, hidden size, heads and vocabulary, and the model has no "
            "config with them"
        )


def _parameters_of(flats: Sequence[_Flat], job: Job) -> int:
    """Bytes of parameters on the device, padding included."""
    if job.params_on_host:
        return 0
    return sum(flat.shard_nbytes if job.stage >= 3 else flat.nbytes for flat in flats)


def _stays(flat: _Flat, job: Job) -> bool:
    """True if the parameters stay on the device in ``sleep(parameters=True)``: frozen ones in no flat tensor."""
    return job.stage < 3 and not flat.trained


# -- the layout ----------------------------------------------------------------------------------------------------


def _lay_out(model: ModelShapes, job: Job, sharding: Sharding) -> _Laid:
    parameters = model.parameters
    if job.stage >= 3:
        return _Laid([list(_of_unit(model, unit, sharding, job)) for unit in model.units])
    every = range(len(parameters))[::-1] if model.order is None else model.order
    order = [index for index in every if parameters[index].trained]
    rooms = {index: parameters[index].room for index in order}
    numels = {index: parameters[index].numel for index in order}
    of_experts = {sharers: _sharding_of_experts(sharding, sharers) for p in parameters if (sharers := p.sharers)}
    kinds = {
        index: BucketKind(p.dtype, p.cut, sharding if p.sharers is None else of_experts[p.sharers], job.rule_of(p))
        for index, p in ((index, parameters[index]) for index in order)
    }
    shapes = {index: shape for index in order if (shape := parameters[index].shape) is not None}
    costs = {index: job.rule_of(parameters[index]).cost(shape) for index, shape in shapes.items()}
    layouts = layouts_by_size(rooms, kinds, job.bucket_cap_mb, order, costs)
    flats = [
        _Flat(
            layout.holding(numels),
            kind.dtype,
            True,
            kind.sharding,
            kind.rule,
            *_joined([parameters[slot.param] for slot in layout.slots], kind.rule),
        )
        for layout, kind in layouts
    ]
    return _Laid([flats, [_alone(p, sharding, job) for p in parameters if not p.trained]])


def _of_unit(model: ModelShapes, unit: Sequence[int], sharding: Sharding, job: Job) -> Iterator[_Flat]:
    """Lay out a unit: by dtype, cut and trained, as ``UnitPlan.flats`` does, and by the rules of the optimizer."""
    kinds: dict[tuple[torch.dtype, bool, bool, UpdateRule], list[ParameterShape]] = {}
    for parameter in (model.parameters[index] for index in unit):
        kind = parameter.dtype, parameter.cut, parameter.trained, job.rule_of(parameter)
        kinds.setdefault(kind, []).append(parameter)
    for (dtype, _, trained, rule), of_kind in kinds.items():
        layout = one_bucket([parameter.room for parameter in of_kind], sharding.shard_count)
        numels = {number: parameter.numel for number, parameter in enumerate(of_kind)}
        joined = _joined(of_kind, rule) if trained else (0, 1)
        yield _Flat(layout.holding(numels), dtype, trained, sharding, rule, *joined)


def _joined(parameters: Sequence[ParameterShape], rule: UpdateRule) -> tuple[int, int]:
    """Count elements of slices that are made whole, and the ranks that have them."""
    joined = [p for p in parameters if p.joined > 1 and rule.joins_parts]
    return sum(p.numel for p in joined), max((p.joined for p in joined), default=1)


def _alone(parameter: ParameterShape, sharding: Sharding, job: Job) -> _Flat:
    """A frozen parameter, which has no place in a bucket below stage 3: no padding."""
    layout = BucketLayout((), 1, parameter.numel)
    return _Flat(layout, parameter.dtype, False, sharding, job.rule_of(parameter))


# -- the kinds -----------------------------------------------------------------------------------------------------


def _count_flats(memory: dict[str, int], laid: _Laid, job: Job) -> None:
    """Count parameters and gradients."""
    for flat in laid.flats:
        layout = flat.layout
        if not flat.trained and job.stage < 3:
            memory["parameters"] += flat.nbytes
            continue
        numel = layout.shard_numel if job.stage >= 3 else layout.numel
        held = [] if job.params_on_host else [FlatBytes("parameters", numel, flat.dtype.itemsize)]
        if flat.trained:
            numel = layout.numel if flat.sharding.keeps_full_gradients else layout.shard_numel
            held.append(FlatBytes("gradients", numel, flat.sharding.grad_dtype(flat.dtype).itemsize))
        _count(memory, flat, held, job, ())


def _count(
    memory: dict[str, int],
    flat: _Flat,
    held: Sequence[FlatBytes],
    job: Job,
    states: Sequence[StateTensor],
) -> None:
    """Count a flat tensor. ``states``: the tensors of its state that are counted, too."""
    if job.rank is None:
        pieces = list(_all_pieces(flat.layout))
        count_bucket(memory, flat.layout, pieces, held, states, ranks=flat.layout.shards)
    else:
        pieces = list(flat.layout.pieces(flat.sharding.shard_index))
        count_bucket(memory, flat.layout, pieces, held, states)


def _all_pieces(layout: BucketLayout) -> Iterator[SlotPiece]:
    """Give the pieces of all slots that all ranks hold together."""
    return replace(layout, shards=1).pieces(0)


def _communication(laid: _Laid, job: Job, sharding: Sharding) -> int:
    """Count the buffers: two, as large as the largest bucket. At stage 3 a buffer gets memory as a bucket takes it: so
    they are as large as the two largest. Under gloo one reduction waits for the one before: there is one buffer, and
    what other ranks send of the bucket. One part of that the shard itself receives, if its dtype is that."""
    sizes = sorted(buffer_nbytes([(flat.layout.numel, flat.dtype)], sharding) for flat in laid.buckets)[-COUNT:]
    if job.stage < 3:
        return COUNT * max(sizes, default=0)
    if job.host_waits and sharding.reduces:
        shards, dtypes = sharding.shard_count, {flat.dtype for flat in laid.buckets}
        received_there = all(sharding.grad_dtype(dtype) == sharding.reduce_dtype(dtype) for dtype in dtypes)
        return max(sizes, default=0) * (2 * shards - (2 if received_there else 1)) // shards
    return sum(sizes)


def _unsharded(laid: _Laid, job: Job, sharding: Sharding) -> int:
    """Count whole units: the root, the largest run of a unit and those gathered ahead, and all that are kept."""
    if not sharding.reduces:
        return 0
    root, *units = (sum(flat.nbytes for flat in unit) for unit in laid.units)
    if (keepers := _keepers(job, sharding)) == 1:
        return root + sum(units)
    at_a_time = 1 + job.prefetch
    ahead = max((sum(units[start : start + at_a_time]) for start in range(len(units))), default=0)
    return root + ahead + (sum(units) // keepers if keepers else 0)


def _keepers(job: Job, sharding: Sharding) -> int:
    """Count the ranks that together keep a unit between forward and backward: 1: each keeps all; 0: none does."""
    if isinstance(job.reshard_after_forward, bool):
        return int(not job.reshard_after_forward)
    return job.reshard_after_forward if job.reshard_after_forward < sharding.shard_count else 0


def _local_gradients(laid: _Laid, job: Job, sharding: Sharding) -> int:
    """Count local gradients: of one bucket; at stage 3 of the root, which is over last, and of one unit. Where
    micro-batches add up on the rank, and not in full gradients that it keeps, those of all buckets."""
    if job.adds_up and not sharding.keeps_full_gradients:
        return sum(flat.nbytes for flat in laid.buckets)
    if job.stage < 3 or not sharding.reduces:
        return max((flat.nbytes for flat in laid.buckets), default=0)
    root, *units = (sum(flat.nbytes for flat in unit if flat.trained) for unit in laid.units)
    return root + max(units, default=0)


def _activations(model: ModelShapes, job: Job, stage: int) -> int:
    if job.batch is None or model.width is None:
        return 0
    kept = in_flight(job.pipeline, stage, job.accumulate) if job.pipeline > 1 else 1
    head = stage == job.pipeline - 1
    whole = activation_bytes(model.width, job.batch, _itemsize(model), in_flight=kept, head=head)
    # With sequence parallelism, as torch and Megatron have it, each holds an equal part of all of them.
    return whole // job.tensor


def _itemsize(model: ModelShapes) -> int:
    """Bytes of an element of activations."""
    return max((parameter.dtype.itemsize for parameter in model.parameters), default=2)


# -- where the state is --------------------------------------------------------------------------------------------


def _mirrors(laid: _Laid, job: Job, sharding: Sharding) -> int:
    """Bytes of this rank's shards of gradients, and of parameters that are on the device."""
    parameters = 0 if job.params_on_host else sum(flat.shard_nbytes for flat in laid.buckets)
    gradients = sum(flat.layout.shard_numel * sharding.grad_dtype(flat.dtype).itemsize for flat in laid.buckets)
    return parameters + gradients


def _place_state(pages: Sequence[int], laid: _Laid, job: Job, sharding: Sharding, *, others: int) -> Footprint:
    """Count what the state takes of each memory. ``others``: bytes of all else on the device."""
    visiting = [flat.shard_nbytes for flat in laid.buckets] if job.params_on_host else []
    twice = zip(pages, visiting or [0] * len(pages), laid.buckets, strict=True)
    ahead = (of for of in twice if has_master(of[2].rule, of[2].dtype) and not of[2].is_joined(job))
    spares = [page + guest for page, guest, _ in ahead]
    left = max(0, (job.device_memory or 0) - others)
    room = left if sum(pages) <= left else max(0, left - FRAMES * max(pages, default=0))
    shared = sharding.shard_count > 1
    mirrors = _mirrors(laid, job, sharding)
    return footprint(job.offload, pages, mirrors, sum(spares) if shared else 0, visiting, room=room)


def _in_update(laid: _Laid, job: Job, sharding: Sharding) -> int:
    """Count what an update of whole matrices takes at most. A batch is in bf16, once, and once more for shards and for
    slices that are joined. Beside it is a message of that size (both ends, or one where ranks only share the work), or
    the iteration, of one parameter or of some small ones, whichever is larger."""
    flats = [flat for flat in laid.buckets if not flat.rule.layout.cuts]
    if not flats:
        return 0
    device = torch.device("cpu" if job.host_waits else "cuda")
    together = ON_A_PROCESSOR if job.host_waits else ON_A_GPU
    largest = max(slot.numel * flat.slices for flat in flats for slot in flat.layout.slots)
    iteration = _ITERATION * max(largest, min(together, sum(flat.layout.shard_numel for flat in flats)))
    over_shards = job.stage >= 3 and sharding.shard_count > 1
    alike: dict[tuple[UpdateRule, torch.dtype, int], list[_Flat]] = {}
    for flat in flats[::-1]:
        if flat.is_joined(job) or flat.is_shared(job):
            alike.setdefault((flat.rule, flat.dtype, flat.slices), []).append(flat)
    most = iteration
    for (*_, slices), of_kind in alike.items():
        sizes = [Size(flat.layout.shard_numel, len(flat.layout.slots)) for flat in of_kind]
        rest, held = iter(sizes), torch.bfloat16.itemsize * (1 + over_shards + (slices > 1))
        for length in batch_lengths(sizes, sharding.shard_count * slices, device):
            numel = sum(size.numel for size in islice(rest, length))
            ends = 2 if over_shards or slices > 1 else 1
            most = max(most, held * numel + max(ends * torch.bfloat16.itemsize * numel, iteration))
    return most


# -- what is communicated ------------------------------------------------------------------------------------------


def _traffic(laid: _Laid, job: Job, sharding: Sharding) -> dict[str, int]:
    """Count what is sent in a step. At stage 3 each forward gathers all units, and each backward all but the root."""
    if not sharding.reduces:
        return {}
    reduced = sum(flat.layout.numel * sharding.reduce_dtype(flat.dtype).itemsize for flat in laid.buckets)
    if job.stage == 0:
        return {"all_reduce": reduced}
    across = {} if sharding.grid is None else {"all_reduce": reduced // sharding.shard_count}
    if job.stage < 3:
        return {"reduce_scatter": reduced, **across, "all_gather": sum(flat.nbytes for flat in laid.buckets)}
    root, *units = (sum(flat.nbytes for flat in unit) for unit in laid.units)
    forwards = backwards = job.accumulate * sum(units)
    traffic = {"reduce_scatter": reduced, **across, "all_gather": job.accumulate * root + forwards}
    keepers = _keepers(job, sharding)
    if keepers == 0:
        traffic["all_gather"] += backwards
    elif keepers > 1:
        traffic["node_all_gather"] = backwards
    joining = [flat for flat in laid.buckets if flat.rule.joins_parts]
    joined = sum(slot.numel for flat in joining for slot in flat.layout.slots) // sharding.shard_count
    if joined and sharding.shard_count > 1:
        traffic["all_to_all"] = _there_and_back([joined])
    return traffic


def _there_and_back(elements: Iterable[int]) -> int:
    """Count what is sent to where parameters are made whole, and back, as if all ranks had as much."""
    return 2 * sum(elements) * torch.bfloat16.itemsize


def _terms(cut: ModelShapes, job: Job) -> int:
    """Count gradients of what is not cut: under sequence parallelism each tensor-parallel rank has a term of them."""
    parameters = (p for p in cut.parameters if p.trained and not p.cut)
    return sum(p.numel * (job.grad_reduce_dtype or p.dtype).itemsize for p in parameters)


def _along_slices(model: ModelShapes, job: Job, traffic: Mapping[str, int]) -> int:
    """Count what is sent among tensor-parallel ranks: the terms, in an all-reduce, slices that are made whole, and
    what layers send.

    A layer takes two all-reduces of its activations [s, b, h] in a forward, and two in a backward: Shoeybi et al.,
    "Megatron-LM" (2019), section 3. Under sequence parallelism an all-gather and a reduce-scatter take the place of
    each, with the same bytes: Korthikanti et al. (2022), section 4.2.2. ``checkpointing`` runs the forward twice. What
    embedding and head send is left out.
    """
    if job.tensor == 1:
        return 0
    of_layer = 6 if job.batch is not None and job.batch.checkpointing else 4
    layers = model.width.layers if model.width is not None else 0
    whole = traffic[TERMS] + of_layer * layers * job.accumulate * _between_layers(model, job)
    return (2 * whole + traffic.get(TENSOR_ALL_TO_ALL, 0)) * (job.tensor - 1) // job.tensor


def _along_pipeline(model: ModelShapes, job: Job, stage: int) -> int:
    """Count what is sent to the stages before and behind: of each micro-batch activations forward, and their gradients
    back. Each sequence-parallel rank sends its part."""
    neighbours = (stage > 0) + (stage < job.pipeline - 1)
    return neighbours * job.accumulate * _between_layers(model, job) // job.tensor


def _between_layers(model: ModelShapes, job: Job) -> int:
    """Bytes of the activations [s, b, h] of a micro-batch between two layers; 0 where no batch was given."""
    if job.batch is None or model.width is None:
        return 0
    return job.batch.sequences * job.batch.tokens * model.width.hidden * _itemsize(model)
