"""Optimizer state dicts: the form, what one rank saves and loads, and averages of the parameters.

``save`` gives what ``opt.state_dict()`` returns; ``load`` takes it back. ``ema_state_dict`` gives averages as a state
dict, ``ema_swapped`` puts them in place of the parameters for a while.
"""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..engine import Engine
from ..errors import StateMismatchError
from ..mode import Mode
from ..params.flat_shard import FlatShard
from ..params.parameter_set import ParameterSet, own_names
from ..rules.codec import saved_codec
from ..rules.group_rules import GroupRules
from ..rules.update_rule import UpdateRule, tensors_for
from ..step.saved_state import Copy, SavedState, is_rounded, plan_load, tensors_of
from ..validate import check_groups

T = TypeVar("T")
Groups = Sequence[dict[str, Any]]

# Fixed by the constructor: a saved group changes none of these, nor options with ``stays``.
_FIXED_OPTIONS = ("params", "param_names", "decoupled_weight_decay")

PLACE = "place"
"""The key of a state dict, beside torch's two, where other ranks have other parameters under the same names."""
PARTS = "parts"
"""The key of how many parameters, in the order of the state, were laid out together. It is there after parameters are
thawed or added, until the next layout of buckets."""
STAGE = "stage"
"""The key of the pipeline stage within ``PLACE``."""


def state_keys(groups: Groups) -> list[str | int]:
    """List the key of each parameter in a state dict: its own name, else its index over all groups."""
    return [index if name is None else name for index, name in enumerate(own_names(groups))]


def pack_groups(groups: Groups) -> list[dict[str, Any]]:
    """Put indices over all groups in place of parameters, as torch saves groups."""
    packed = [{name: value for name, value in group.items() if name != "params"} for group in groups]
    index = itertools.count()
    for options, group in zip(packed, groups, strict=True):
        options["params"] = [*itertools.islice(index, len(group["params"]))]
    return packed


def with_torch_options(groups: Groups, rules: Sequence[UpdateRule]) -> list[dict[str, Any]]:
    """Add every option that groups of torch's counterpart have. ``rules``: of each group."""
    return [{**rule.torch_options, **group, **rule.described} for rule, group in zip(rules, groups, strict=True)]


def make_state_dict(
    engine: Engine, groups: Groups, state: Mapping[int, dict[str, Tensor]], *, as_torch: bool = True
) -> dict[str, Any]:
    """Put ``state`` (by parameter index) into torch's format, in its order. ``as_torch``: with options of torch's
    counterpart, and without names of parameters."""
    if as_torch:
        groups = [{name: value for name, value in group.items() if name != "param_names"} for group in groups]
        groups = with_torch_options(groups, engine.rules.by_group)
    keys, steps = state_keys(groups), engine.hyper.steps.float()
    by_key = {keys[index]: {**tensors, "step": steps[index].clone()} for index, tensors in state.items()}
    return {"state": by_key, "param_groups": pack_groups(groups)}


def match_state(
    state_dict: Mapping[str, Any], parameters: ParameterSet, rules: GroupRules
) -> dict[int, Mapping[str, Any]]:
    """Give the saved state by parameter index, in its own order, without that of frozen parameters. Raises
    StateMismatchError where groups or step counts do not fit; tensors are not checked."""
    if not isinstance(state_dict, Mapping):
        raise StateMismatchError(f"an optimizer state is a dict, got {type(state_dict).__name__}")
    if missing := {"state", "param_groups"} - set(state_dict):
        raise StateMismatchError(f"no optimizer state: {sorted(missing)} missing, found {sorted(map(str, state_dict))}")
    saved_groups = state_dict["param_groups"]
    listed = isinstance(saved_groups, Sequence) and all(isinstance(g, Mapping) and "params" in g for g in saved_groups)
    if not listed or not isinstance(state_dict["state"], Mapping):
        raise StateMismatchError("no optimizer state: 'state' must be a dict, 'param_groups' a list of dicts")
    groups, labels = parameters.groups, parameters.labels
    check_groups_fit(saved_groups, groups, rules.by_group)
    for number, (rule, options) in enumerate(zip(rules.by_group, saved_groups, strict=True)):
        if (refusal := rule.refuse_options(number, options)) is not None:
            raise StateMismatchError(refusal)
    index_of = index_by_key(saved_groups, groups)
    if unknown := [key for key in state_dict["state"] if key not in index_of]:
        raise StateMismatchError(f"the state holds {unknown[:5]}, which this optimizer does not train")
    saved: dict[int, Mapping[str, Any]] = {}
    for key, entry in state_dict["state"].items():
        if isinstance(entry, Mapping):
            # None are momentum buffers of torch's SGD before its first step. For absent ones see ``to_load_whole``.
            entry = {name: v for name, v in entry.items() if v is not None and not hasattr(v, "zero_optim_absent")}
        if entry != {}:
            _check_entry(entry, labels[index_of[key]], rules.of(index_of[key]))
            saved[index_of[key]] = entry
    if ignored := [labels[index] for index in saved if index not in parameters.trained]:
        warnings.warn(f"the state of {', '.join(ignored[:5])} is not loaded: frozen here", stacklevel=2)
    return {index: entry for index, entry in saved.items() if index in parameters.trained}


def _has_shards(saved: Mapping[int, Mapping[str, Any]]) -> bool:
    """True if the state fits one layout alone: full tensors fit any."""
    return any(isinstance(value, FlatShard) for entry in saved.values() for value in entry.values())


def saved_state_of(saved: Mapping[int, Mapping[str, Any]], parameters: ParameterSet, rules: GroupRules) -> SavedState:
    """Make the record of what ``match_state`` gave."""
    steps = [0.0] * len(parameters.labels)
    tensors, rounded = {}, set()
    for index, entry in saved.items():
        steps[index] = float(entry.get("step", 1))  # 1 for a rule that needs no count: there was an update
        rule = rules.of(index)
        forms = tensors_of(entry, rule, parameters.trained[index].dtype)
        tensors[index] = [tensor.name for tensor, _ in forms]
        rounded |= {tensor.name for tensor, codec in forms if is_rounded(tensor.name, rule, codec)}
    return SavedState(tensors, torch.tensor(steps, dtype=torch.float64, device="cpu"), frozenset(rounded))


def load_groups(groups: Groups, saved: Groups, rules: Sequence[UpdateRule]) -> None:
    """Take over the options of saved parameter groups; the parameters and their names stay. ``rules``: of each group;
    empty for an optimizer of torch's."""
    copies: dict[int, Any] = {}  # a tensor that several saved groups have, as one rate of all, stays one tensor
    for group, options, rule in itertools.zip_longest(groups, saved, rules):
        taken = options if rule is None else _taken(options, rule)
        kept = {name: value for name, value in taken.items() if name not in _FIXED_OPTIONS}
        group.update(copy.deepcopy(kept, copies))


def _taken(options: Mapping[str, Any], rule: UpdateRule) -> dict[str, Any]:
    """Choose what a load takes over of a saved group's ``options``."""
    stay = {option.name for option in rule.options if option.stays}
    return {name: value for name, value in options.items() if name not in stay}


def check_groups_fit(saved: Groups, groups: Groups, rules: Sequence[UpdateRule]) -> None:
    """Raise StateMismatchError for saved groups of other sizes, or with options that these cannot have."""
    sizes, expected = [len(group["params"]) for group in saved], [len(group["params"]) for group in groups]
    if sizes != expected:
        raise StateMismatchError(f"the state has parameter groups of sizes {sizes}, this optimizer {expected}")
    for number, (rule, options) in enumerate(zip(rules, saved, strict=True)):
        if (refusal := rule.refuse_saved(number, options)) is not None:
            raise StateMismatchError(refusal)
    taken = [_taken(options, rule) for options, rule in zip(saved, rules, strict=True)]
    try:
        check_groups(rules, [{**group, **options} for group, options in zip(groups, taken, strict=True)])
    except (TypeError, ValueError) as error:
        raise StateMismatchError(f"in the state's parameter groups, {error}") from error


def index_by_key(saved: Groups, groups: Groups) -> dict[Hashable, int]:
    """Map every key that a state may use to an index: torch's own, by place in the groups, or a parameter's name."""
    ids = [key for group in saved for key in group["params"]]
    names = own_names([*saved])
    own = state_keys(groups)
    if names != own and None not in names and sorted(map(str, names)) == sorted(map(str, own)):
        first = next(name for name, other in zip(names, own, strict=True) if name != other)
        raise StateMismatchError(
            f"the state holds the same parameters in another order: {first!r} stands elsewhere. Give them in its order"
        )
    index_of: dict[Hashable, int] = {}
    for keys in (own, names, ids):  # the last count: keys as the state itself lists them
        index_of.update({key: index for index, key in enumerate(keys) if key is not None})
    return index_of


def _check_entry(entry: Any, label: str, rule: UpdateRule) -> None:
    if not isinstance(entry, Mapping) or ("step" not in entry and rule.needs_steps):
        found = sorted(map(str, entry)) if isinstance(entry, Mapping) else type(entry).__name__
        raise StateMismatchError(f"the state of {label} has no 'step', but {found}")
    kept = {"step"}
    for tensor in rule.tensors:
        codec = saved_codec(tensor, entry, rule.codecs)
        kept |= {tensor.name} if codec is None else {part.name for part in codec.parts(tensor)}
    if unknown := [name for name, value in entry.items() if name not in kept and isinstance(value, Tensor)]:
        raise StateMismatchError(
            f"the state of {label} holds {unknown[0]}, which this optimizer does not keep: it was saved by another, or "
            "with other options, such as amsgrad=True or ema_decay. Train on with that one, or drop it from the state"
        )
    step = entry.get("step", 1)
    good = isinstance(step, int | float) or (isinstance(step, Tensor) and step.numel() == 1 and not step.is_complex())
    count = float(step) if good else math.nan
    if not (0 <= count < math.inf and count.is_integer()):
        raise StateMismatchError(f"the step of {label} must be a count of updates, got {step!r}")


# -- one rank's state --------------------------------------------------------------------------------------------------


def save(engine: Engine, groups: Groups, *, as_torch: bool) -> dict[str, Any]:
    """Make the state dict, of views of the live state. ``as_torch``: with options of torch's counterpart, no names."""
    engine.keep_edits()
    if as_torch:
        engine.shardings.check_whole("torch.distributed.checkpoint")
        engine.shardings.check_joined("torch.distributed.checkpoint")
    exported = engine.states.export()
    # A load lays out the same buckets by this order. Within a bucket parameters may lie in another.
    in_order = {index: exported[index] for index in engine.reducer.layout.order}
    state_dict = make_state_dict(engine, groups, in_order, as_torch=as_torch)
    if as_torch:
        return state_dict
    parts = engine.reducer.layout.parts
    if len(parts) > 1 and engine.sharded_model is None and _has_shards(exported):
        state_dict[PARTS] = [len(part) for part in parts]
    if place := _place(engine):
        state_dict[PLACE] = place
    return state_dict


def collect(
    tensors: Iterable[tuple[T, Tensor]], device: torch.device, *, wanted: bool, copy: bool = True
) -> dict[T, Tensor]:
    """Collective. Collect the tensors that an iterator of collectives gives with their keys, where ``wanted``."""
    copies: dict[T, Tensor] = {}
    failure: Exception | None = None
    for key, tensor in tensors:
        # To the end, whatever fails here: the other ranks wait for this one in each gather.
        if wanted and failure is None:
            try:
                copies[key] = tensor.to(device, copy=copy)
            except (MemoryError, RuntimeError) as error:
                failure = error
    if failure is not None:
        raise failure
    return copies


def gather(engine: Engine, *, wanted: bool, device: torch.device) -> dict[int, dict[str, Tensor]]:
    """Collective. Gather the whole logical state on ``device``, by parameter index, where it is ``wanted``."""
    tensors = (((index, name), whole) for index, name, whole in engine.states.whole_tensors())
    state: dict[int, dict[str, Tensor]] = {index: {} for index in engine.parameters.trained} if wanted else {}
    for (index, name), copied in collect(tensors, device, wanted=wanted).items():
        state[index][name] = copied
    return state


def save_whole(engine: Engine, groups: Groups, *, on_rank_0: bool) -> dict[str, Any]:
    """Collective. Make the state dict of whole tensors, as ``get_optimizer_state_dict(full_state_dict=True)`` has it.
    ``on_rank_0``: rank 0 alone gets the state, on the CPU; else all ranks do, on the device."""
    world = engine.sharding.world
    with world.raising_together("get_optimizer_state_dict"):
        engine.shardings.check_whole("torch.distributed.checkpoint")
        engine.shardings.check_joined("torch.distributed.checkpoint")
    device = torch.device("cpu") if on_rank_0 else engine.sharding.device
    with world.raising_together("get_optimizer_state_dict"):  # memory may be short on one rank
        state = gather(engine, wanted=not on_rank_0 or world.ranks[world.rank] == 0, device=device)
    return make_state_dict(engine, groups, state)


def to_load_whole(engine: Engine, groups: Groups) -> dict[str, Any]:
    """Make the state dict in which ``set_optimizer_state_dict(full_state_dict=True)`` puts whole tensors."""
    state: dict[int, dict[str, Tensor]] = {}
    for index, parameter in engine.parameters.trained.items():
        names = [tensor.name for tensor in tensors_for(engine.rules.of(index), parameter.dtype)]
        state[index] = {name: torch.empty(0, device=parameter.device) for name in names}
    made = make_state_dict(engine, groups, state)
    for tensor in (tensor for entry in made["state"].values() for tensor in entry.values()):
        tensor.zero_optim_absent = True  # where torch puts nothing in its place, ``match_state`` drops it
    return made


def _place(engine: Engine) -> dict[str | int, list[int]]:
    """Give the number of this rank's pipeline stage, and by parameter index of its slice or expert, each with how many
    there are. Empty where the state is the same on all ranks."""
    place: dict[str | int, list[int]] = {}
    if engine.pipeline is not None:
        place[STAGE] = [engine.pipeline.comm.rank, engine.pipeline.comm.world_size]
    for index in range(len(engine.parameters.labels)):
        number, count = engine.shardings.slice_of(index)
        if count > 1:
            place[index] = [number, count]
    return place


def _check_place(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Raise StateMismatchError where a state dict is of another stage, slice or expert."""
    own = _place(engine)
    for what, (number, count) in saved.get(PLACE, {}).items():
        # Where one of the two has no number, as an optimizer without ``pipeline=``, any fits.
        if (here := own.get(what, [number, count])) != [number, count]:
            name = "the stage of a pipeline" if what == STAGE else f"the slice of {engine.parameters.labels[what]}"
            raise StateMismatchError(
                f"the state is of another rank: {name} is number {number} of {count} there, and {here[0]} of {here[1]} "
                "here. Each rank loads what itself has saved; zero_optim.checkpoint.save and load do that on any "
                "number of ranks"
            )


def load(engine: Engine, groups: Groups, state_dict: Mapping[str, Any]) -> None:
    """Collective. Nothing is changed on any rank unless the state fits on all. The caller has settled the engine."""
    world, parameters = engine.sharding.world, engine.parameters
    with world.raising_together("load_state_dict"):
        saved = match_state(state_dict, parameters, engine.rules)
        _check_place(engine, state_dict)
        own_parts = _saved_parts(groups, state_dict, saved)
    planned: list[Copy] | None = None
    with suppress(StateMismatchError):  # the saved ranges are not those that this rank has: see below
        planned = plan_load(engine.states.shards, saved, parameters.labels)
    every = world.gather_objects((planned is not None, own_parts), "load_state_dict")
    fits, parts = zip(*every, strict=True)
    # Keys stand in the order of the layout, unless they were sorted by group, as torch.distributed.checkpoint does.
    # A sorted state that fits needs no other layout.
    if parts[0] and not (all(fits) and all(part == sorted(part) for part in parts[0])):
        planned = None
        engine.reducer.restore_order(*parts[0])  # collective: all ranks take rank 0's order
    with world.raising_together("load_state_dict"):
        if planned is None:
            planned = plan_load(engine.states.shards, saved, parameters.labels)
    state = saved_state_of(saved, parameters, engine.rules)
    engine.begin_load(state)
    engine.states.load(planned or ())
    engine.states.raise_lost_together()  # a rank whose disk failed must not raise alone
    engine.end_load(state)
    load_groups(groups, state_dict["param_groups"], engine.rules.by_group)


def _saved_parts(
    groups: Groups, state_dict: Mapping[str, Any], saved: Mapping[int, Mapping[str, Any]]
) -> list[list[int]]:
    """Give the order of the layout that shards were saved in, by ``PARTS``; none for full tensors, which fit any."""
    if not _has_shards(saved):
        return []
    index_of = index_by_key(state_dict["param_groups"], groups)
    order = iter([index_of[key] for key in state_dict["state"]])
    parts = [[*itertools.islice(order, length)] for length in state_dict.get(PARTS, ())]
    loaded = [[index for index in part if index in saved] for part in (*parts, [*order])]
    return [part for part in loaded if part]


# -- averages ----------------------------------------------------------------------------------------------------------


@torch.inference_mode(False)  # pages that are fetched are written later
@torch.no_grad()
def ema_state_dict(engine: Engine, groups: Groups, which: int, rank: int | None) -> dict[str | int, Tensor]:
    """See ``ShardedOptimizer.ema_state_dict``. The caller has settled the engine."""
    name, savers, keys = average_name(engine, which), engine.sharding.savers, state_keys(groups)
    with engine.sharding.world.raising_together("ema_state_dict"):
        if rank is not None and rank not in range(savers.world_size):
            raise ValueError(f"rank must be None or one of {savers.world_size} ranks, got {rank!r}")
        engine.shardings.check_whole("ema_state_dict")
    engine.begin_averages()
    tensors = ((keys[i], whole) for i, _, whole in engine.states.whole_tensors(lambda tensor: tensor.name == name))
    with engine.sharding.world.raising_together("ema_state_dict"):
        return collect(tensors, torch.device("cpu"), wanted=rank is None or rank == savers.rank)


@contextmanager
def ema_swapped(engine: Engine, which: int) -> Iterator[None]:
    """See ``ShardedOptimizer.swap_to_ema``. The caller has settled the engine."""
    name = average_name(engine, which)
    if engine.sharded_model is not None:
        engine.sharded_model.schedule.check_not_gathered("swap_to_ema")
    with torch.inference_mode(False), torch.no_grad():
        engine.begin_averages()
        engine.states.set_aside()  # the averages overwrite the parameters
    engine.mode.now = Mode.AVERAGE
    try:
        with torch.inference_mode(False), torch.no_grad():
            engine.states.show(name)
            engine.param_gather.wait()  # averages are in flight to ranks that do not own them
        yield
    finally:
        if engine.mode.now is Mode.AVERAGE:  # else the optimizer was closed within
            try:
                engine.settle()  # units that a forward has gathered are resharded
            finally:
                with torch.inference_mode(False), torch.no_grad():
                    engine.states.put_back()
                    engine.param_gather.wait()  # so are the parameters on their way back
                engine.mode.now = Mode.OWN


def average_name(engine: Engine, which: int) -> str:
    """Find the name of average number ``which``. Raises ValueError where there is none."""
    names = engine.rules.averages
    if not 0 <= which < len(names):
        raise ValueError(
            f"there is no average {which}: the optimizer was made with {len(names)}; give it ema_decay=0.999"
        )
    return names[which]
