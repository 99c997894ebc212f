"""The memory of a running job: the plan of its optimizer, the same kinds measured, and an allocation that failed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm.streams import is_there
from ..engine import Engine, open_engines
from ..errors import OutOfMemoryError, ZeroOptimError
from ..figures import SizeUnit, row, size, unit_for
from ..params.tensor_slice import local_of
from ..rules.update_rule import UpdateRule
from ..stats import memory_by_kind
from ..units.unit import Unit
from .models import ModelShapes, ParameterShape, shape_of
from .plan import ON_THE_HOST, Job, Plan, plan
from .report import of_one, remedy


class HasEngine(Protocol):
    """A ``ShardedOptimizer``."""

    @property
    def engine(self) -> Engine: ...


def plan_of(optimizer: HasEngine, *, mean: bool = False, accumulate: int = 1) -> Plan:
    """Plan what this rank holds of the optimizer's parameters, gradients and state, from their shapes alone.

    Activations are not in it, nor are the buffers of modules.

    Args:
        mean: plan the mean of all ranks, in place of this one.
        accumulate: micro-batches in a step, all but the last within ``no_sync``.
    """
    return plan_of_engine(optimizer.engine, mean=mean, accumulate=accumulate)


def plan_of_engine(engine: Engine, *, mean: bool = False, accumulate: int = 1) -> Plan:
    sharding, sharded = engine.sharding, engine.sharded_model
    units = [] if sharded is None else sharded.units
    job = Job(
        world=sharding.world_size,
        replicas=1 if sharding.grid is None else sharding.grid.across.world_size,
        stage=sharding.stage,
        rank=None if mean else sharding.shard_index if sharding.stage else sharding.data_parallel.rank,
        bucket_cap_mb=engine.settings.bucket_cap_mb,
        grad_reduce_dtype=sharding.grad_reduce_dtype,
        grad_accumulation_dtype=sharding.grad_accumulation_dtype,
        prefetch=1 if sharded is None else sharded.schedule.prefetch.count,
        reshard_after_forward=_reshards(units),
        accumulate=accumulate,
        offload=engine.offload,
        param_offload=sharded is not None and sharded.offload,
        device_memory=device_memory(sharding.device),
        host_waits=sharding.host_waits,
        rule=engine.rules.all[0],
    )
    return plan(_shapes_of(engine) if sharded is None else _shapes_of_units(engine, units), job)


def _shapes_of(engine: Engine) -> ModelShapes:
    trained = engine.parameters.trained
    shapes = [
        replace(
            shape_of(p, trained=index in trained or p.requires_grad),
            shard_group=_shard_group(engine, index),
            rule=_other_rule(engine, index),
        )
        for index, p in enumerate(engine.parameters.all)
    ]
    order = engine.reducer.layout.order
    whole = set(order) == {index for index, shape in enumerate(shapes) if shape.trained}
    units = _units_by_name([engine.parameters.name(index) for index in range(len(shapes))])
    return ModelShapes("the optimizer's parameters", tuple(shapes), units, order=tuple(order) if whole else None)


def _other_rule(engine: Engine, index: int) -> UpdateRule | None:
    """Give a parameter's rule; None where it is the job's."""
    rule = engine.rules.of(index)
    return None if rule is engine.rules.all[0] else rule


def _shard_group(engine: Engine, index: int) -> tuple[int, int] | None:
    sharding = engine.shardings.of(index)
    return (sharding.shard_group.world_size, sharding.shard_group.rank) if sharding.of_experts else None


def _units_by_name(names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Guess what stage 3 would gather together: all parameters of ``blocks.3.``, and of each such number. The root
    first; empty where no name has a number."""
    units: dict[str, list[int]] = {"": []}
    for index, name in enumerate(names):
        numbered = re.match(r"(.*?\.\d+)\.", name)
        units.setdefault(numbered[1] if numbered else "", []).append(index)
    return tuple(map(tuple, units.values())) if len(units) > 1 else ()


def _shapes_of_units(engine: Engine, units: Sequence[Unit]) -> ModelShapes:
    trained = engine.parameters.trained
    rules = {id(parameter): _other_rule(engine, index) for index, parameter in trained.items()}
    shapes: list[ParameterShape] = []
    of_units = []
    for unit in units:
        first = len(shapes)
        every = [(p, flat.trained) for flat in unit.flats for p in flat.params]
        shapes += [replace(shape_of(p, trained=trained), rule=rules.get(id(p))) for p, trained in every]
        of_units.append(tuple(range(first, len(shapes))))
    return ModelShapes("the sharded model", tuple(shapes), tuple(of_units))


def _reshards(units: Sequence[Unit]) -> bool | int:
    """Read ``shard_module``'s ``reshard_after_forward`` off a unit other than the root, which stays."""
    for unit in units[1:]:
        return not unit.keep if unit.node is None else unit.node.world_size
    return True


def held(engine: Engine) -> dict[str, int]:
    """Bytes on the device now, by the kinds of a plan: ``stats()["memory"]``, with frozen parameters among the
    parameters."""
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
    """Bytes of all of a GPU's memory; of a CPU ``ON_THE_HOST``."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else ON_THE_HOST


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
            self._watch(engine)
            for kind, nbytes in held(engine).items():
                memory[kind] = memory.get(kind, 0) + nbytes
        seen = memory | {"communication": sum(engine.reducer.rounds.buffers.peak_nbytes() for engine in engines)}
        for kind, nbytes in seen.items():
            self.peak[kind] = max(nbytes, self.peak.get(kind, 0))
        return memory

    def allocated(self) -> dict[str, int]:
        """Ask torch's allocator, on the GPUs of the open optimizers: bytes ``now``, and the ``peak`` since the block
        was entered. Empty on a CPU, where torch keeps no account."""
        gpus = _gpus()
        if not gpus:
            return {}
        now, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        return {"now": sum(map(now, gpus)), "peak": sum(map(peak, gpus))}

    def beside_torch(self) -> int:
        """Count bytes in use on these GPUs outside of torch's allocator: CUDA's context, NCCL's communicators, and what
        other processes have there. No plan has them. 0 on a CPU."""
        used = 0
        for gpu in _gpus():
            free, total = torch.cuda.mem_get_info(gpu)
            used += total - free - torch.cuda.memory_reserved(gpu)
        return used

    def table(self, planned: Plan | None = None) -> str:
        """Tabulate what was measured at most, by kind, in GB, MB or kB; beside it what ``planned`` has, and the
        difference."""
        unit = unit_for(
            max([*self.peak.values(), *(planned.memory.values() if planned is not None else ())], default=0)
        )
        lines = [row(f"{unit.name} a rank", ["measured", *(["planned", ""] if planned else [])])]
        for kind, nbytes in self.peak.items():
            wanted = planned.memory.get(kind) if planned is not None else None
            lines.append(row(kind, [unit.cell(nbytes), *_beside(nbytes, wanted, unit)]))
        lines += [f"  allocated by torch, {when}: {size(nbytes)}" for when, nbytes in self.allocated().items()]
        if _gpus():
            lines.append(f"  beside torch's allocator, in no plan: {size(self.beside_torch())}")
        return "\n".join(lines)

    def _watch(self, engine: Engine) -> None:
        """Look as each unit's forward begins: then the unit and those gathered ahead are whole."""
        for unit in engine.sharded_model.units if engine.sharded_model is not None else ():
            if id(unit) not in self._watched:
                self._watched.add(id(unit))
                self._hooks.append(unit.module.register_forward_pre_hook(self._look))

    def _look(self, *_: Any) -> None:
        self.now()


def _beside(measured: int, planned: int | None, unit: SizeUnit) -> list[str]:
    if planned is None:
        return []
    return [unit.cell(planned), f"{measured / planned - 1:+.2%}" if planned else ""]


def _gpus() -> list[torch.device]:
    return list(dict.fromkeys(e.sharding.device for e in open_engines() if e.sharding.device.type == "cuda"))


def track() -> Tracker:
    """A context manager that measures what a running job holds, by the kinds of a plan::

        with zero_optim.memory.track() as memory:
            train()
        print(memory.table(zero_optim.memory.plan_of(opt)))

    It looks at all open optimizers of the process, also those that are made within the block: after every step, as
    each unit's forward begins, and at every call of ``now()``. It reads sizes alone, nothing from the device.
    ``peak`` has the most of each kind, ``allocated()`` what torch's allocator says on a GPU, whose peak it resets, and
    ``beside_torch()`` what a GPU has in use beside it.
    """
    return Tracker()


# -- an allocation that failed ---------------------------------------------------------------------------------------

_OF_THE_CPU = ("can't allocate memory", "not enough memory")
"""Words of torch's allocator of the CPU, in a RuntimeError: on Linux, and on other systems."""


@contextmanager
def explaining_out_of_memory(engine: Engine, doing: str) -> Iterator[None]:
    """Until the first step is over, raise ``OutOfMemoryError`` with the plan, from what the allocator raised.

    Later the optimizer takes no new memory, and whatever is raised passes. ``doing``: for people, as in "in step".
    """
    try:
        yield
    except RuntimeError as error:
        if engine.steps or not ran_out(error):
            raise
        raise OutOfMemoryError(_message(engine, doing, error)) from error


def ran_out(error: RuntimeError) -> bool:
    """True if an allocator has raised it, for want of memory."""
    if isinstance(error, ZeroOptimError):
        return False  # it is explained already: perhaps another rank ran out
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OF_THE_CPU)


def _message(engine: Engine, doing: str, error: RuntimeError) -> str:
    device = engine.sharding.device
    there = device_memory(device)
    made = plan_of_engine(engine)
    lines = [f"out of memory on {device}, {doing}: {str(error).splitlines()[0]}", "", of_one(made), ""]
    if device.type == "cuda" and made.most <= there:
        lines.append(
            f"The plan takes {size(made.most)} of {size(there)}. Activations, other tensors or other processes "
            f"have the rest: torch has {size(torch.cuda.memory_allocated(device))} in use. A smaller batch, or:"
        )
    lines.append(remedy(made, there))
    return "\n".join(lines)
