"""The memory of a running job: the plan of its optimizer, the same kinds measured, and an allocation that failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm.sharding import Sharding
from ..comm.streams import is_there
from ..engine import Engine, open_engines
from ..errors import OutOfMemoryError, ZeroOptimError
from ..figures import row, size, unit_for
from ..params.tensor_slice import local_of
from ..stats import memory_by_kind
from ..units.unit import Unit
from .models import ModelShapes, ParameterShape, shape_of
from .plan import Job, Plan, plan
from .report import of_one, remedy

# What torch's allocator of the CPU writes in a RuntimeError: on Linux, and on other systems.
_OF_THE_CPU = ("can't allocate memory", "not enough memory")


class HasEngine(Protocol):
    """A ``ShardedOptimizer``, whose module imports this one."""

    @property
    def engine(self) -> Engine: ...


def plan_of(optimizer: HasEngine, *, mean: bool = False, accumulate: int = 1) -> Plan:
    """Plan what this rank holds of the optimizer's parameters, gradients and state, from their shapes alone.

    Activations are not in it, nor are the buffers of modules.

    Args:
        mean: plan the mean of all ranks, in place of this one.
        accumulate: micro-batches in a step, all but the last within ``no_sync``.
    """
    engine = optimizer.engine
    sharding, sharded = engine.sharding, engine.sharded_model
    units = [] if sharded is None else sharded.units
    reshard: bool | int = True
    if len(units) > 1:  # the root, which is first, stays whole
        reshard = not units[1].keep if units[1].node is None else units[1].node.world_size
    grid, rank = sharding.grid, sharding.shard_index if sharding.stage else sharding.data_parallel.rank
    if grid is not None:
        rank = grid.across.rank * grid.within.world_size + grid.within.rank
    job = Job(
        world=sharding.world_size,
        replicas=1 if grid is None else grid.across.world_size,
        state_over="all" if grid is not None and grid.over_all else "shard",
        stage=sharding.stage,
        rank=None if mean else rank,
        bucket_cap_mb=engine.settings.bucket_cap_mb,
        grad_reduce_dtype=sharding.grad_reduce_dtype,
        grad_accumulation_dtype=sharding.grad_accumulation_dtype,
        prefetch=1 if sharded is None else sharded.schedule.prefetch.count,
        reshard_after_forward=reshard,
        accumulate=accumulate,
        offload=engine.offload,
        param_offload=None if sharded is None or sharded.backing is None else "nvme" if sharded.disk else "cpu",
        device=sharding.device.type,
        device_memory=device_memory(sharding.device),
        host_waits=sharding.host_waits,
        rule=engine.rules.all[0],
    )
    return plan(_shapes_of(engine) if sharded is None else _shapes_of_units(engine, units), job)


def _shapes_of(engine: Engine) -> ModelShapes:
    parameters, shapes = engine.parameters, []
    units: dict[str, list[int]] = {"": []}  # the root's first
    for index, parameter in enumerate(parameters.all):
        sharding, trained = engine.shardings.of(index), index in parameters.trained or parameter.requires_grad
        shape = shape_of(parameter, trained=trained)
        shapes.append(replace(shape, shard_group=_shard_group(sharding), rule=engine.rules.of(index)))
        # A guess at what stage 3 would gather together: all parameters of "blocks.3.", and of each such number.
        numbered = re.match(r"(.*?\.\d+)\.", parameters.name(index))
        units.setdefault(numbered[1] if numbered else "", []).append(index)
    order = engine.reducer.layout.order
    learned = set(order) == {index for index, shape in enumerate(shapes) if shape.trained}
    of_units = tuple(map(tuple, units.values())) if len(units) > 1 else ()
    return ModelShapes("the optimizer's parameters", tuple(shapes), of_units, order=tuple(order) if learned else None)


def _shapes_of_units(engine: Engine, units: Sequence[Unit]) -> ModelShapes:
    rules = {id(parameter): engine.rules.of(index) for index, parameter in engine.parameters.trained.items()}
    shapes: list[ParameterShape] = []
    of_units = []
    for unit in units:
        first = len(shapes)
        for flat in unit.flats:
            own, group = [shape_of(p, trained=flat.trained) for p in flat.params], _shard_group(flat.sharding)
            shapes += [
                replace(of, shard_group=group, rule=rules.get(id(p))) for of, p in zip(own, flat.params, strict=True)
            ]
        of_units.append(tuple(range(first, len(shapes))))
    return ModelShapes("the sharded model", tuple(shapes), tuple(of_units))


def _shard_group(sharding: Sharding) -> tuple[int, int] | None:
    return (sharding.shard_count, sharding.shard_index) if sharding.of_experts else None


def held(engine: Engine) -> dict[str, int]:
    """Count bytes on the device now, by the kinds of a plan: those of ``stats()``, and frozen parameters."""
    memory = memory_by_kind(engine)
    if engine.sharded_model is None:
        frozen = (p for index, p in enumerate(engine.parameters.all) if index not in engine.parameters.trained)
        memory["parameters"] += sum(local_of(parameter).nbytes for parameter in frozen)
        return memory
    flats = (flat for unit in engine.sharded_model.units for flat in unit.flats)
    for flat in (flat for flat in flats if not flat.trained and not flat.offloaded and is_there(flat.shard)):
        used = sum(piece.numel for piece in flat.pieces) * flat.dtype.itemsize
        memory["parameters"] += used
        memory["padding"] += flat.shard.nbytes - used
    return memory


def device_memory(device: torch.device) -> int:
    """Bytes of all of a GPU's memory; of a CPU the host's, taken as without limit."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 2**63


class Tracker:
    """A measurement of what the open optimizers of this process hold, together; see ``track``.

    Attributes:
        peak: by kind, the most bytes that were seen of it; not all at one time.
    """

    def __init__(self) -> None:
        self.peak: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._watched: set[int] = set()  # ids of units

    def __enter__(self) -> Tracker:
        for device in _gpus():
            torch.cuda.reset_peak_memory_stats(device)
        self._hooks.append(register_optimizer_step_post_hook(self._look))
        self.now()
        return self

    def __exit__(self, *_: object) -> None:
        self.now()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def now(self) -> dict[str, int]:
        """Measure the bytes that are held now, by kind."""
        memory: dict[str, int] = {}
        engines = open_engines()
        for engine in engines:
            for unit in engine.sharded_model.units if engine.sharded_model is not None else ():
                if id(unit) not in self._watched:  # as its forward begins, it and the units gathered ahead are whole
                    self._watched.add(id(unit))
                    self._hooks.append(unit.module.register_forward_pre_hook(self._look))
            for kind, nbytes in held(engine).items():
                memory[kind] = memory.get(kind, 0) + nbytes
        # Communication buffers keep their own peak: they are in use within a backward, where nothing measures.
        seen = memory | {"communication": sum(engine.reducer.rounds.buffers.peak_nbytes() for engine in engines)}
        for kind, nbytes in seen.items():
            self.peak[kind] = max(nbytes, self.peak.get(kind, 0))
        return memory

    def allocated(self) -> dict[str, int]:
        """Return bytes of torch's allocator on the GPUs of the open optimizers: ``now``, and the ``peak`` since the
        block was entered. Empty on a CPU, where torch does not count."""
        gpus = _gpus()
        now, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        return {"now": sum(map(now, gpus)), "peak": sum(map(peak, gpus))} if gpus else {}

    def beside_torch(self) -> int:
        """Count bytes in use on these GPUs outside of torch's allocator: CUDA's context, NCCL's communicators, and what
        other processes have there. No plan has them. 0 on a CPU."""
        used = 0
        for gpu in _gpus():
            free, total = torch.cuda.mem_get_info(gpu)
            used += total - free - torch.cuda.memory_reserved(gpu)
        return used

    def table(self, planned: Plan | None = None) -> str:
        """Tabulate the peak by kind, in GB, MB or kB; beside it what ``planned`` has, and the difference."""
        plan = {} if planned is None else planned.memory
        unit = unit_for(max([*self.peak.values(), *plan.values()], default=0))
        lines = [row(f"{unit.name} a rank", ["measured", *(["planned", ""] if planned else [])])]
        for kind, nbytes in self.peak.items():
            cells = [unit.cell(nbytes)]
            if kind in plan:
                cells += [unit.cell(plan[kind]), f"{nbytes / plan[kind] - 1:+.2%}" if plan[kind] else ""]
            lines.append(row(kind, cells))
        lines += [f"  allocated by torch, {when}: {size(nbytes)}" for when, nbytes in self.allocated().items()]
        if _gpus():
            lines.append(f"  beside torch's allocator, in no plan: {size(self.beside_torch())}")
        return "\n".join(lines)

    def _look(self, *_: Any) -> None:
        self.now()


def _gpus() -> list[torch.device]:
    return list(dict.fromkeys(e.sharding.device for e in open_engines() if e.sharding.device.type == "cuda"))


def track() -> Tracker:
    """A context manager that measures what a running job holds, by the kinds of a plan::

        with zero_optim.memory.track() as memory:
            train()
        print(memory.table(zero_optim.memory.plan_of(opt)))

    It measures all open optimizers of the process, also those that are made within the block: after every step, as
    each unit's forward begins, and at every call of ``now()``. It reads sizes alone, nothing from the device.
    ``peak`` has the most of each kind, ``allocated()`` the bytes of torch's allocator on a GPU, whose peak it resets,
    and ``beside_torch()`` what a GPU has in use beside it.
    """
    return Tracker()


@contextmanager
def explaining_out_of_memory(optimizer: HasEngine, doing: str) -> Iterator[None]:
    """Until the first step is over, raise ``OutOfMemoryError`` with the plan, from what the allocator raised.

    Later the optimizer allocates nothing, and whatever is raised passes. ``doing``: for the message, as in "in step".
    """
    try:
        yield
    except RuntimeError as error:
        ran_out = isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OF_THE_CPU)
        # A ZeroOptimError is explained already: another rank may have run out.
        if optimizer.engine.steps or isinstance(error, ZeroOptimError) or not ran_out:
            raise
        device = optimizer.engine.sharding.device
        there, made = device_memory(device), plan_of(optimizer)
        lines = [f"out of memory on {device}, {doing}: {str(error).splitlines()[0]}", "", of_one(made), ""]
        if device.type == "cuda" and made.most <= there:
            lines.append(
                f"The plan takes {size(made.most)} of {size(there)}. Activations, other tensors or other processes "
                f"have the rest: torch has {size(torch.cuda.memory_allocated(device))} in use. A smaller batch, or:"
            )
        raise OutOfMemoryError("\n".join([*lines, remedy(made, there)])) from error
