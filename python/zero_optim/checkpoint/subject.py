"""The subject of a save or a load: a model, its optimizers and the objects beside them, on the ranks that have them."""

from __future__ import annotations

import importlib.metadata
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack as Undo
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..comm.collectives import Comm, make_comm
from ..comm.together import check_same, together
from ..engine import check_whole
from ..errors import CheckpointError, ParameterError, StateMismatchError
from ..params.tensor_slice import is_distributed, is_slice
from ..step.saved_state import call_load_hooks
from ..units.sharded_model import sharded_model_of
from .contents import ColumnRanks, Columns, Names, TensorContents, contents_of_model, modules_with_state
from .index import Index, SavedOptimizer, decode, encode
from .matching import Match, match, saved_names
from .optimizers import OptimizerPart, Sharded, ShardedPart, TorchPart, is_sharded
from .rank_file import decoded
from .rank_state import load_groups


def make_subject(
    model: nn.Module, opt: Any, where: str, *, scaler: Any = None, scheduler: Any = None, data: Any = None
) -> Subject:
    """Collective. Use the ranks of the first sharded optimizer, else of the sharded model, else the default group.
    Raises TypeError, ClosedError, or CheckpointError, on all ranks where it does so on one."""
    parameters = [*model.parameters()] if isinstance(model, nn.Module) else []
    shardings = [one.engine.sharding for one in _each(opt) if is_sharded(one)]
    shardings = shardings or [sharded.sharding for sharded in sharded_model_of(parameters)]
    comm = shardings[0].world if shardings else make_comm(device=_device_of(parameters))
    beside = {"scaler": _each(scaler), "scheduler": _each(scheduler)}
    return together(comm, lambda: Subject(model, _each(opt), comm, beside, data), where)


def _device_of(parameters: Iterable[Tensor]) -> torch.device:
    """The device that the training is on."""
    return next((parameter.device for parameter in parameters), torch.device("cpu"))


class Subject:
    """A model and its optimizers, as they are saved and loaded.

    Attributes:
        optimizers: sharded ones, or torch's.
        comm: the ranks that save and load together.
        beside: lists of scalers and schedulers, whose states are saved and loaded, too, as is that of ``data``.
        columns: the ranks with the same slices of parameters.
        device: where the training is.
    """

    def __init__(
        self, model: nn.Module, optimizers: list[Any], comm: Comm, beside: Mapping[str, list[Any]], data: Any
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: give a module")
        self.model, self.optimizers, self.comm = model, optimizers, comm
        self.beside, self.data = beside, data
        seen: set[int] = set()
        for number, one in enumerate(self.optimizers):
            if not isinstance(one, torch.optim.Optimizer):
                raise TypeError(f"opt is a {type(one).__name__}: give an optimizer, or a list of them")
            own = {id(parameter) for group in one.param_groups for parameter in group["params"]}
            if own & seen:
                raise CheckpointError(f"optimizer {number} has parameters that one before it has, too: give each once")
            seen |= own
        self._sharded: list[Sharded] = [one for one in self.optimizers if is_sharded(one)]
        for sharded in self._sharded:
            sharded.check_usable()
        check_whole("a checkpoint", model.parameters())
        self._models = sharded_model_of(model.parameters())
        self.device = _device_of(model.parameters())
        shardings = [sharded.engine.sharding for sharded in self._sharded]
        shardings += [of.sharding for of in self._models]
        cut = next((of for of in shardings if of.tensor_ranks is not None), None)
        flats = [flat for of in self._models for unit in of.units for flat in unit.flats]
        known = [(parameter, flat.sharding) for flat in flats for parameter in flat.params]
        for engine in (sharded.engine for sharded in self._sharded):
            known += [(parameter, engine.shardings.of(index)) for index, parameter in enumerate(engine.parameters.all)]
        of_experts = {id(p): ColumnRanks(of.data_parallel) for p, of in known if of.of_experts and is_distributed(p)}
        main = None if cut is None else ColumnRanks(cut.data_parallel, (cut.plain_slices, cut.slice_index))
        self.columns = Columns(main, of_experts)

    def check_same_call(self, given: Mapping[str, Any], where: str) -> None:
        """Collective. Raise RankMismatchError unless ranks give objects of the same classes, and the same ``given``."""
        counts = [sum(len(group["params"]) for group in one.param_groups) for one in self.optimizers]
        kinds = [type(one).__name__ for one in self.optimizers]
        described = {"opt": list(zip(kinds, counts, strict=True)), "model": type(self.model).__name__, **given}
        described |= {**{what: len(those) for what, those in self.beside.items()}, "data": self.data is not None}
        check_same(self.comm, [f"{name}={value!r}" for name, value in described.items()], where, f"give {where}")

    def come_to_rest(self) -> None:
        """Collective. Finish what is in flight, and reshard every unit."""
        for sharded in self._sharded:
            sharded.settle()  # collective: reductions and gathers of the last step may be in flight
            sharded.engine.begin_averages()
        for model in self._models:
            model.schedule.reshard_all()  # a unit that stays gathered would hold stale values after a load

    def contents(self, names: Names, *, stored: bool) -> tuple[TensorContents, list[OptimizerPart]]:
        """Collect what is in the model, and in each optimizer, at rest. ``stored``: see ``ShardedPart``.
        Raises ParameterError where slices would be saved, or loaded, as if they were wholes."""
        known = self.comm.world_size == 1 or self._sharded or self._models
        for name, parameter in names.parameters.items():
            if is_slice(parameter) and not known:
                raise ParameterError(
                    f"parameter {name!r} has tensor_model_parallel = True, and which ranks have the same slice is not "
                    "known: give its optimizer, too"
                )
        several = self.columns.main is not None and self.columns.main.stack[0] > 1
        of_torch = [group for one in self.optimizers if not is_sharded(one) for group in one.param_groups]
        for parameter in (parameter for group in of_torch for parameter in group["params"]):
            if several and is_slice(parameter):
                raise ParameterError(
                    f"parameter {names.of(parameter, 'a parameter')!r} has tensor_model_parallel = True, and is in an "
                    "optimizer of torch's, which does not know which ranks have the other slices: give it to a "
                    "ShardedAdamW"
                )
        model = contents_of_model(self.model, names, self.comm, self.columns)
        return model, [
            ShardedPart(one, names, stored=stored) if is_sharded(one) else TorchPart(one, names, self.comm)
            for one in self.optimizers
        ]

    def describe(self, names: Names, optimizers: Sequence[OptimizerPart]) -> dict[str, Any]:
        """Give the index's entries beside tensors."""
        stages = [sharded.engine.sharding.stage for sharded in self._sharded]
        return {
            "aliases": names.aliases,
            "optimizers": [saved for optimizer in optimizers for saved in optimizer.describe()],
            "module_states": {
                name: encode(module.get_extra_state(), f"the extra state of {name!r}")
                for name, module in modules_with_state(self.model).items()
            },
            **{f"{what}s": [encode(one.state_dict(), f"the {what}") for one in of] for what, of in self.beside.items()},
            "configuration": {"world_size": self.comm.world_size, "stages": stages},
            "versions": {"zero_optim": _version(), "torch": str(torch.__version__)},
        }

    def check_not_gathered(self, what: str) -> None:
        """Raise ShardAccessError within ``gather_parameters``, where whole parameters take the place of shards."""
        for model in self._models:
            model.schedule.check_not_gathered(what)

    def plan(self, index: Index, *, strict: bool) -> LoadPlan:
        """Match ``index`` with what is here. Raises StateMismatchError where it cannot be loaded."""
        names = Names(self.model)
        model, optimizers = self.contents(names, stored=False)
        index = decoded(index)  # from here on it does not matter in which form state was stored
        saved_name = saved_names(index, names)
        wanted = [optimizer.wanted(index, saved_name) for optimizer in optimizers]
        matched = match(index, names, saved_name, model.specs, [one for of in wanted for one in of])
        here, there = sorted(modules_with_state(self.model)), sorted(index.module_states)
        if here != there:
            matched.misfits.append(f"modules with a state of their own are {here} here, and {there} there")
        for what, objects in self.beside.items() if self.optimizers else ():
            count = len(getattr(index, f"{what}s"))
            if len(objects) != count:
                matched.misfits.append(
                    f"the checkpoint has the state of {count} {what}(s), and {len(objects)} given here: give load "
                    f"{what}= what save was given"
                )
        has_data = any(of_rank["data"] is not None for of_rank in index.ranks)
        if self.optimizers and has_data != (self.data is not None):
            positions, remedy = ("positions", "give load data=") if has_data else ("no positions", "leave out data=")
            matched.misfits.append(f"the checkpoint has {positions} in data: {remedy}")
        numbers, known = iter(matched.groups), itertools.chain(index.optimizers, itertools.repeat(SavedOptimizer()))
        saved = [[next(known) for _ in of] for of in wanted]
        groups = [part.groups_of(of, [next(numbers) for _ in of]) for part, of in zip(optimizers, saved, strict=True)]
        if strict and matched.misfits:
            raise StateMismatchError(
                f"{'; '.join(matched.misfits)}. With strict=False what fits is loaded, and state that is missing is "
                "initialized"
            )
        return LoadPlan(index, matched, model, optimizers, saved, groups)

    def load_others(self, plan: LoadPlan, own: Mapping[str, Any] | None, undo: Undo) -> None:
        """Load all that is no tensor. ``own``: random states and position in the data that this rank has saved."""
        for one, groups in zip(self.optimizers, plan.groups, strict=True):
            for group in one.param_groups:
                undo.callback(group.update, dict(group))
                undo.callback(group.clear)  # the last callback runs first
            load_groups(one.param_groups, groups, one.engine.rules.by_group if is_sharded(one) else ())
        for name, module in modules_with_state(self.model).items():
            if name in plan.index.module_states:
                state = decode(plan.index.module_states[name])
                _load_one(f"module {name!r}", module, state, undo, "get_extra_state", "set_extra_state")
        for what, here in self.beside.items():
            for one, state in zip(here, map(decode, getattr(plan.index, f"{what}s")), strict=False):
                if state != {}:  # of a scaler that was not enabled
                    _load_one(what, one, state, undo)
        if own is not None and self.data is not None and own["data"] is not None:
            _load_one("data", self.data, own["data"], undo)

    def take_over(self, plan: LoadPlan) -> None:
        """Take over all else, once the tensors are filled."""
        for optimizer in plan.optimizers:
            optimizer.take_over(plan.matched)
        for sharded in self._sharded:
            call_load_hooks(sharded)


def _load_one(
    label: str, one: Any, state: Any, undo: Undo, get: str = "state_dict", take: str = "load_state_dict"
) -> None:
    """Load the state of an object. ``get``, ``take``: its methods. ``undo`` gives it the old state back."""
    with suppress(Exception):  # what cannot give its state cannot get it back
        undo.callback(_give_back, getattr(one, take), getattr(one, get)())
    try:
        getattr(one, take)(state)
    except Exception as error:
        raise StateMismatchError(
            f"the {label} does not take its state in the checkpoint: {type(error).__name__}: {error}"
        ) from error


def _give_back(take: Callable[[Any], object], state: Any) -> None:
    with suppress(Exception):  # an object that failed may fail once more: the first error is raised
        take(state)


@dataclass(frozen=True)
class LoadPlan:
    """The plan of a load. Each of ``optimizers`` has ``saved``, the index's entries for its rules, and ``groups``."""

    index: Index
    matched: Match
    model: TensorContents
    optimizers: Sequence[OptimizerPart]
    saved: Sequence[Sequence[SavedOptimizer]]
    groups: Sequence[Sequence[dict[str, Any]]]


def _each(value: Any) -> list[Any]:
    """List what a user gave: None, one, or several."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _version() -> str:
    try:
        return importlib.metadata.version("zero-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


# -- generators of random numbers: torch's, Python's, and NumPy's where it is used -------------------------------------


def read_random_states(device: torch.device) -> dict[str, Any]:
    """Read the states, as plain values and tensors, by generator."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:  # not imported for this: a program without NumPy has no such state
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.from_numpy(words).clone(), *rest)
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the states that ``read_random_states`` gave, but for generators that are not used here."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and "numpy" in sys.modules:
        kind, words, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, words.numpy(), *rest))
