"""Gradients that are given, on every topology: parameters have the oracle's bits.

A topology is a table of kinds of parameters: which ranks begin with the same values, which have the same gradient, and
whose gradients make an average. The oracle knows nothing else of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cells import slow_after
from grid_cases import make_mesh as make_grid
from harness import run_ranks
from oracle import Hyper, MasterAdamW, accumulate, pack_rounded
from simulated_gpu.switch import LATE
from tensor_cases import make_mesh
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from training_cases import DTYPES, SHAPES, TINY_CAP_MB, assert_bitwise, difference, maybe_no_sync
from zero_optim import ShardedAdamW, gather_parameters, shard_module

STEPS, TENSOR = 3, 2
HYPER = Hyper(lr=1e-2, weight_decay=0.1)
Rows = tuple[tuple[int, ...], ...]


# -- trainings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One training.

    Attributes:
        micro: backwards of a step; with ``no_sync``, all but the last are under ``opt.no_sync()``.
        attached: gathers overlap the next forward.
        absent: each rank leaves out some gradients, others than the other ranks.
        later: the last parameters come by ``add_param_group``.
        frozen: the first and the last parameter need no gradient before the last step.
        offload: of state, and at stage 3 of parameters.
        reshard: ``reshard_after_forward``.
    """

    stage: int
    micro: int = 1
    no_sync: bool = False
    cap_mb: float = TINY_CAP_MB
    reduce_dtype: torch.dtype | None = None
    overlap: bool = True
    attached: bool = False
    absent: bool = False
    later: bool = False
    frozen: bool = False
    offload: str | None = None
    reshard: bool = True


ACCUMULATIONS = ((1, False), (3, True), (2, False))
CELLS = [
    *(
        Cell(stage, *way, (TINY_CAP_MB, 25.0)[(stage + turn) % 2])
        for stage, (turn, way) in itertools.product((0, 1, 2), enumerate(ACCUMULATIONS))
    ),
    *(Cell(stage, 3, no_sync=stage != 1, absent=True) for stage in (0, 1, 2)),
    *(Cell(stage, 2, no_sync=True, reduce_dtype=torch.float32, overlap=False) for stage in (0, 1, 2)),
    *(Cell(stage, 2, later=True) for stage in (1, 2)),
    *(Cell(stage, frozen=True) for stage in (1, 2)),
    Cell(2, 2, no_sync=True, absent=True, cap_mb=25.0),
    *(Cell(stage, 2, attached=True) for stage in (1, 2)),
    Cell(2, 3, no_sync=True, cap_mb=25.0, attached=True),
    *(Cell(2, 2, offload=tier) for tier in ("cpu", "paged", "nvme:{folder}")),
    *(Cell(3, *way, absent=True) for way in ACCUMULATIONS),
    Cell(3, 2, no_sync=True, reduce_dtype=torch.float32, overlap=False),
    Cell(3, 2, offload="cpu"),
    Cell(3, 2, absent=True, reshard=False),
]


# -- topologies --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Parameters of one kind. The functions are of a rank.

    Attributes:
        values: a key of what it begins with. Of ranks with the same key the first one's values count.
        gradient, absent: keys of its gradients, and of whether it leaves them out.
        rows: the ranks whose gradients make its average. Those of a row are summed first, and rounded.
        cut: the dimension along which the parameter is a slice of a DTensor.
        dtensor, terms: whether it is a DTensor, and one of which each rank has a term of the gradient.
        marks: Megatron's, of a plain parameter.
        late: whether it is in the second parameter group.
    """

    shapes: Sequence[tuple[int, ...]]
    rows: Callable[[int], Rows]
    divisor: int
    values: Callable[[int], int] = lambda rank: 0
    gradient: Callable[[int], int] = lambda rank: rank
    absent: Callable[[int], int] = lambda rank: rank
    cut: int | None = None
    dtensor: bool = False
    terms: bool = False
    marks: dict[str, bool] | None = None
    late: bool = False


@dataclass(frozen=True)
class Topology:
    """``world`` is collective: what ``given`` and ``second`` make options of, those of the optimizer and those of its
    second group. ``at_once``: a gradient is reduced after each backward, whatever ``no_sync`` says."""

    ranks: int
    kinds: tuple[Kind, ...]
    world: Callable[[], Any]
    given: Callable[[Any], dict[str, Any]]
    second: Callable[[Any], dict[str, Any]] = lambda world: {}
    at_once: bool = False

    @property
    def averaging(self) -> int:
        """How many ranks have a gradient of their own in an average."""
        rows = [kind.rows(0) for kind in self.kinds if not kind.terms and not kind.marks]
        return max(len(of) * len(of[0]) for of in rows)

    def parameters(self) -> list[tuple[Kind, tuple[int, ...]]]:
        return [(kind, shape) for kind in self.kinds for shape in kind.shapes]


def rows_of(ranks: Sequence[int]) -> Rows:
    """One dimension: ranks are added up one by one."""
    return tuple((rank,) for rank in ranks)


def flat(ranks: int) -> Topology:
    rows = rows_of(range(ranks))
    kinds = tuple(Kind(part, lambda rank: rows, ranks, late=late) for late, part in enumerate((SHAPES[:4], SHAPES[4:])))
    return Topology(ranks, kinds, lambda: None, lambda world: {}, at_once=ranks == 1)


def hybrid(shards: int, replicas: int = 2, **given: Any) -> Topology:
    ranks = replicas * shards
    rows = tuple(tuple(range(first, first + shards)) for first in range(0, ranks, shards))
    kinds = tuple(Kind(part, lambda rank: rows, ranks, late=late) for late, part in enumerate((SHAPES[:4], SHAPES[4:])))
    return Topology(ranks, kinds, lambda: make_grid(replicas, shards), lambda mesh: {"mesh": mesh, **given})


def tensor_parallel(data: int) -> Topology:
    """Slices of DTensors, uneven ones among them; copies; plain parameters; and terms, as of sequence parallelism."""
    column = lambda rank: rows_of(range(rank % TENSOR, data * TENSOR, TENSOR))  # noqa: E731
    every = lambda rank: tuple((row, row + 1) for row in range(0, data * TENSOR, TENSOR))  # noqa: E731
    of_data = {"divisor": data, "absent": lambda rank: rank // TENSOR}
    same = {"rows": column, "gradient": lambda rank: rank // TENSOR, **of_data}
    own = lambda rank: rank % TENSOR  # noqa: E731
    kinds = (
        Kind(((5, 7), (1, 3), (300, 9), (6,)), **same, values=own, cut=0, dtensor=True),
        Kind(((6, 4), (7, 5), (9, 300)), **same, values=own, cut=1, dtensor=True),
        Kind(((4, 4),), **same, dtensor=True, late=True),
        Kind(((3,),), **same, late=True),
        Kind(((33, 8),), every, **of_data, dtensor=True, terms=True, late=True),
    )
    mesh = lambda: make_mesh(data, TENSOR)  # noqa: E731
    return Topology(data * TENSOR, kinds, mesh, lambda mesh: {"mesh": mesh["dp"]}, lambda mesh: {}, data == 1)


def plain_slices(data: int) -> Topology:
    """Slices, copies and terms with Megatron's marks."""
    column = lambda rank: rows_of(range(rank % TENSOR, data * TENSOR, TENSOR))  # noqa: E731
    every = lambda rank: tuple((row, row + 1) for row in range(0, data * TENSOR, TENSOR))  # noqa: E731
    of_data = lambda rank: rank // TENSOR  # noqa: E731
    cut, term = {"tensor_model_parallel": True}, {"tensor_model_parallel": False, "sequence_parallel": True}
    kinds = (
        Kind(((5, 7), (300, 9), (6,), (1, 300)), column, data, lambda rank: rank % TENSOR, absent=of_data, marks=cut),
        Kind(((33, 8), (7,)), every, data, marks=term, late=True),
        Kind(((4, 4), (3, 1)), column, data, gradient=of_data, absent=of_data, late=True),
    )
    given = lambda mesh: {"mesh": mesh["dp"], "tensor_parallel": mesh["tp"]}  # noqa: E731
    return Topology(data * TENSOR, kinds, lambda: make_mesh(data, TENSOR), given)


def experts(columns: Rows, *, on_grid: bool = False, **given: Any) -> Topology:
    """Dense parameters of four ranks, and experts that the ranks of a column have. ``on_grid``: dense ones have two
    replicas of two shards, with the options ``given``."""
    dense = ((0, 1), (2, 3)) if on_grid else rows_of(range(4))
    column = lambda rank: next(column for column in columns if rank in column)  # noqa: E731
    kinds = (
        Kind(SHAPES, lambda rank: dense, 4),
        Kind(SHAPES, lambda rank: rows_of(column(rank)), 4, lambda rank: 50 + column(rank)[0], late=True),
    )

    def world() -> Any:
        groups = {ranks: dist.new_group(list(ranks)) for ranks in columns}
        return groups[column(dist.get_rank())], make_grid(2, 2)

    second = lambda world: {"process_group": world[0], "grad_divisor": 4}  # noqa: E731
    return Topology(4, kinds, world, lambda world: {"mesh": world[1], **given} if on_grid else {}, second)


TOPOLOGIES = {
    "one rank": flat(1),
    "two ranks": flat(2),
    "three ranks": flat(3),
    "four ranks": flat(4),
    "replicas of two shards": hybrid(2),
    "replicas of three shards": hybrid(3),
    "tensor parallel": tensor_parallel(2),
    "tensor parallel, three data-parallel ranks": tensor_parallel(3),
    "tensor parallel alone": tensor_parallel(1),
    "plain slices": plain_slices(2),
    "plain slices alone": plain_slices(1),
    "experts of two ranks": experts(((0, 2), (1, 3))),
    "experts of one rank": experts(rows_of(range(4))),
    "experts beside replicas of shards": experts(((0, 2), (1, 3)), on_grid=True),
    "three replicas, state over all": hybrid(2, 3, state_over="all"),
    "experts beside state over all": experts(((0, 2), (1, 3)), on_grid=True, state_over="all"),
}


# -- what a rank has, and what it does ---------------------------------------------------------------------------------


@functools.cache
def random(shape: tuple[int, ...], index: int, *keys: int, exact: int | None = None) -> Tensor:
    """Normal, or ``exact`` times few bits: sums and averages over up to so many ranks are exact then, up to 4."""
    generator = torch.Generator().manual_seed(functools.reduce(lambda total, key: 100 * total + key, (*keys, index), 7))
    if exact is None:
        return torch.randn(shape, generator=generator)
    return torch.randint(-16, 17, shape, generator=generator) * (exact / 64)


def part_of(kind: Kind, whole: Tensor, rank: int) -> Tensor:
    """The slice of a rank: the first ranks have one row more."""
    if kind.cut is None:
        return whole
    rows = -(-whole.shape[kind.cut] // TENSOR)
    start = min(rows * (rank % TENSOR), whole.shape[kind.cut])
    return whole.narrow(kind.cut, start, min(rows, whole.shape[kind.cut] - start))


def first_value(kind: Kind, shape: tuple[int, ...], index: int, rank: int) -> Tensor:
    return part_of(kind, random(shape, index, 0 if kind.dtensor else kind.values(rank)), rank)


def gradients(topology: Topology, cell: Cell, dtype: torch.dtype, rank: int, step: int, micro: int) -> list:
    """Of one backward, [n] tensors or None. The last parameter has none in two steps, on ranks with the values of
    rank 0: on all of them, but where other ranks have another parameter of its name."""
    parameters, found = topology.parameters(), []
    # An all-reduce over more than two ranks, as at stage 0, has no one order.
    few_bits = cell.stage == 0 and (topology.averaging > 2 or cell.reduce_dtype is not None)
    for index, (kind, shape) in enumerate(parameters):
        last = index == len(parameters) - 1
        missing = (index * 3 + kind.absent(rank) + micro) % 5 == step
        missing |= last and step < 2 and kind.values(rank) == kind.values(0)
        frozen = cell.frozen and (last or index == 0) and step < STEPS - 1
        exact = kind.divisor if few_bits else None
        whole = random(shape, index, 1 + kind.gradient(rank), step, micro, exact=exact)
        found.append(None if frozen or cell.absent and missing else part_of(kind, whole, rank).to(dtype))
    return found


def make_parameters(topology: Topology, dtype: torch.dtype, rank: int, world: Any) -> list[nn.Parameter]:
    """Values that count are on the first rank of those with the same key; the others begin with other ones."""
    made = []
    for index, (kind, shape) in enumerate(topology.parameters()):
        first = min(other for other in range(topology.ranks) if kind.values(other) == kind.values(rank))
        local = first_value(kind, shape, index, rank).to(dtype) + (0 if rank == first else 1 + rank)
        if kind.dtensor:
            placed = [Replicate() if kind.cut is None else Shard(kind.cut)]
            layout = {"shape": torch.Size(shape), "stride": torch.empty(shape).stride()}
            local = DTensor.from_local(local.contiguous(), world["tp"], placed, run_check=False, **layout)
        made.append(nn.Parameter(local))
        for mark, value in (kind.marks or {}).items():
            setattr(made[-1], mark, value)
    return made


class One(nn.Module):
    """A parameter whose gradient is given."""

    def __init__(self, kind: Kind, parameter: nn.Parameter) -> None:
        super().__init__()
        self.kind, self.parameter = kind, parameter

    def forward(self, grad: Tensor) -> Tensor:
        placements = [Partial()] if self.kind.terms else None
        local = self.parameter.to_local(grad_placements=placements) if self.kind.dtensor else self.parameter
        return (local.float() * grad.float()).sum()


class Given(nn.Module):
    def __init__(self, kinds: Sequence[Kind], params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        ones = [One(kind, parameter) for kind, parameter in zip(kinds, params, strict=True)]
        self.first, self.late = (nn.ModuleList(one for one in ones if one.kind.late == late) for late in (False, True))

    def forward(self, grads: Sequence[Tensor | None]) -> Tensor:
        """``grads``: the late ones last."""
        ones = zip((*self.first, *self.late), grads, strict=True)
        return sum((one(grad) for one, grad in ones if grad is not None), torch.zeros((), requires_grad=True))


def train(rank: int, topology: Topology, cell: Cell, dtype: torch.dtype, world: Any, folder: str) -> list[Tensor]:
    """What this rank has of parameters in the end."""
    params = make_parameters(topology, dtype, rank, world)
    model = Given([kind for kind, _ in topology.parameters()], params)
    late = [kind.late for kind, _ in topology.parameters()]
    groups = [{"params": [p for p, of in zip(params, late, strict=True) if of == number]} for number in (False, True)]
    for parameter in (params[0], params[-1]):
        parameter.requires_grad_(not cell.frozen)
    given, second = topology.given(world), topology.second(world)
    groups[1] |= second
    if cell.stage == 3:
        experts = {"late": second["process_group"]} if second else None
        param_offload = "cpu" if cell.offload else None
        options = {"experts": experts, "param_offload": param_offload, "reshard_after_forward": cell.reshard}
        shard_module(model, ("first",), **given, **options)
    opt = ShardedAdamW(
        groups[:1] if cell.later else groups,
        lr=HYPER.lr,
        weight_decay=HYPER.weight_decay,
        stage=cell.stage,
        bucket_cap_mb=cell.cap_mb,
        grad_reduce_dtype=cell.reduce_dtype,
        overlap_grad_reduce=cell.overlap,
        state_offload=None if cell.offload is None else cell.offload.format(folder=folder),
        **given,
    )
    if cell.later:
        opt.add_param_group(groups[1])
    if cell.attached:
        opt.attach(model)
    for step in range(STEPS):
        for parameter in (params[0], params[-1]):
            parameter.requires_grad_(not cell.frozen or step == STEPS - 1)
        for micro in range(cell.micro):
            with maybe_no_sync(opt, cell.no_sync and micro < cell.micro - 1):
                model(gradients(topology, cell, dtype, rank, step, micro)).backward()
        opt.step()
        opt.zero_grad()
    opt.close()
    with gather_parameters(model):
        return [(p.to_local() if isinstance(p, DTensor) else p).detach().clone() for p in params]


# -- what it must have -------------------------------------------------------------------------------------------------


def average(terms: Sequence[Sequence[Tensor | None]], divisor: int, dtype: torch.dtype) -> Tensor | None:
    """``terms``: of each rank, by rows. Each is packed and rounded, each row is summed and rounded, and all are."""
    like = next((term for row in terms for term in row if term is not None), None)
    if like is None:
        return None
    total = torch.zeros(like.shape)
    for row in terms:
        packed = [pack_rounded(term, divisor, dtype).float() for term in row if term is not None]
        if packed:
            total = total + sum(packed[1:], packed[0]).to(dtype).float()
    return total.to(dtype)


def expected(topology: Topology, cell: Cell, dtype: torch.dtype, rank: int) -> list[Tensor]:
    parameters = topology.parameters()
    first = [first_value(kind, shape, index, rank).to(dtype) for index, (kind, shape) in enumerate(parameters)]
    oracle = MasterAdamW(first, HYPER)
    for step in range(STEPS):
        local: list = [None] * topology.ranks
        total = None
        for micro in range(cell.micro):
            for other in range(topology.ranks):
                local[other] = accumulate(local[other], gradients(topology, cell, dtype, other, step, micro))
            if cell.no_sync and micro < cell.micro - 1 and not topology.at_once:
                continue
            new = []
            for index, (kind, _) in enumerate(parameters):
                terms = [[local[other][index] for other in row] for row in kind.rows(rank)]
                mean = average(terms, kind.divisor, cell.reduce_dtype or dtype)
                # At stage 0 ``.grad`` shows the average, in the parameter's dtype.
                new.append(mean.to(dtype) if mean is not None and cell.stage == 0 else mean)
            total, local = accumulate(total, new), [None] * topology.ranks
        oracle.step(total or [])
    return oracle.params


def like(topology: Topology, rank: int) -> int:
    """The first rank that has the same in the end."""
    same = lambda other: all(  # noqa: E731
        kind.values(other) == kind.values(rank) and kind.rows(other) == kind.rows(rank) for kind in topology.kinds
    )
    return next(other for other in range(topology.ranks) if same(other))


# -- tests -------------------------------------------------------------------------------------------------------------


def cells_of(name: str, turn: int) -> list[tuple[Cell, torch.dtype]]:
    """A third of the cells, another one in each turn. Sums over six ranks are exact in no order; one rank reduces
    nothing; and it sums the terms of a unit at once only where all gradients of the unit have come."""
    topology, place = TOPOLOGIES[name], [*TOPOLOGIES].index(name)
    found = []
    for number, cell in enumerate(CELLS):
        fits = not (cell.stage == 0 and topology.averaging > 4 or cell.reduce_dtype is not None and topology.at_once)
        fits &= cell.stage > 0 or "state over all" not in name
        fits &= not (cell.stage == 3 and cell.absent and cell.no_sync and topology.at_once)
        if fits and (number + number // 3 + place + turn) % 3 == 0:
            found.append((cell, DTYPES[(number + place // 2) % 3]))
    return found


def train_cells(rank: int, world_size: int, name: str, cells: Sequence[Any], folder: str) -> list[list[Tensor]]:
    topology = TOPOLOGIES[name]
    world = topology.world()
    return [train(rank, topology, cell, dtype, world, folder) for cell, dtype in cells]


@pytest.mark.parametrize("turn", slow_after(1, (0, 1)))
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_cell_equals_the_oracle_bit_for_bit(name, turn, tmp_path):
    topology = TOPOLOGIES[name]
    results = run_ranks(topology.ranks, train_cells, name, cells_of(name, turn), str(tmp_path), timeout=180)
    failures = []
    for number, (cell, dtype) in enumerate(cells_of(name, turn)):
        oracle = functools.cache(functools.partial(expected, topology, cell, dtype))
        for rank in range(topology.ranks):
            if found := difference(results[rank][number], oracle(like(topology, rank))):
                failures.append(f"{cell}, {dtype}, rank {rank}: {found}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["experts of two ranks", "experts of one rank"])
def test_experts_at_stage_3_have_no_races(name: str) -> None:
    topology = TOPOLOGIES[name]
    cells = [(cell, torch.float32) for cell in (Cell(3, 2, absent=True), Cell(3, 2, no_sync=True, reshard=False))]
    for rank, results in enumerate(run_ranks(topology.ranks, train_cells, name, cells, "", simulated=LATE)):
        for (cell, dtype), params in zip(cells, results, strict=True):
            assert_bitwise([p.cpu() for p in params], expected(topology, cell, dtype, like(topology, rank)), str(cell))


def train_half(rank: int, world_size: int) -> list[Tensor]:
    halves = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("job", "replicate", "shard"))
    topology = TOPOLOGIES["replicas of two shards"]
    return train(rank % 4, topology, Cell(2, 2), torch.float32, halves["replicate", "shard"], "")


def test_two_jobs_side_by_side_each_on_half_of_the_ranks():
    wanted = expected(TOPOLOGIES["replicas of two shards"], Cell(2, 2), torch.float32, 0)
    for params in run_ranks(8, train_half):
        assert_bitwise(params, wanted)
