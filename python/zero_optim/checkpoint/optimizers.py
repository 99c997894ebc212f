"""An optimizer as a checkpoint needs it: a sharded one, or one of torch's."""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from zero_kernels import ROW

from ..comm.together import Ranks
from ..engine import Engine
from ..errors import CheckpointError
from ..params.storage_order import slice_counts
from ..rules import RULES
from ..rules.codec import Per, StateTensor
from ..rules.options import EMA_DECAY, listed_decays
from ..rules.update_rule import UpdateRule, exported_for, master_of, tensors_for
from ..step.saved_state import SavedState, is_rounded
from .contents import Columns, Holders, Holding, Names, TensorContents, in_stack
from .index import BUFFER, PARAMETER, Index, SavedOptimizer, TensorSpec, decode, encode
from .matching import Match, Wanted
from .rank_file import EncodedTensor
from .rank_state import check_groups_fit

_SHARDED = "Sharded"  # the prefix of our optimizers' names in an index: the rule's name follows


class ShardedPart:
    """A ``ShardedOptimizer``: the state that its update rules name, in the ranges that this rank holds.

    In a checkpoint it is an optimizer for each rule, with the rule's groups. So an optimizer with two rules loads what
    two optimizers have saved, and the other way round.

    ``stored``: tensors in the form in which a codec stores them, but for masters, which are fp32: to be saved. Else as
    the logical fp32 tensors, to be loaded: these may have been saved in any form.
    """

    def __init__(self, opt: Sharded, names: Names, *, stored: bool) -> None:
        self._stored = stored
        self._engine, self._groups = opt.engine, opt.param_groups
        parameters = opt.engine.parameters
        parameters.check_groups_unedited(opt.param_groups)
        self._names = [names.of(p, label) for p, label in zip(parameters.all, parameters.labels, strict=True)]

    @property
    def specs(self) -> list[TensorSpec]:
        return [spec for rule in self._engine.rules.all for spec in self._specs_of(rule)]

    def _specs_of(self, rule: UpdateRule) -> list[TensorSpec]:
        return [
            self._spec(index, tensor)[0]
            for index, parameter in self._trained_by(rule).items()
            for tensor in (exported_for if self._stored else tensors_for)(rule, parameter.dtype)
        ]

    def _trained_by(self, rule: UpdateRule) -> dict[int, Tensor]:
        return {i: p for i, p in self._engine.parameters.trained.items() if self._engine.rules.of(i) is rule}

    def _spec(self, index: int, tensor: StateTensor) -> tuple[TensorSpec, int]:
        """Give the spec of a saved tensor, and where the slice of this rank's column begins in it."""
        parameter = self._engine.parameters.all[index]
        bucket, _, slot = self._engine.reducer.layout.slot_of[index]
        own, order = bucket.flat.slices[slot], bucket.flat.orders[slot]
        cut = None if own is None else own.arranged
        spec = TensorSpec(self._names[index], tensor.name, tuple(parameter.shape), tensor.dtype, order, cut)
        if tensor.per is Per.ROW:
            cut = None if own is None else own.cut
            counts = slice_counts(parameter.shape, cut)
            rows = [-(-count // ROW) for count in counts]
            spec = replace(spec, shape=(sum(rows),), cut=None, rows_of=counts if cut is not None else None)
            before = 0 if own is None or cut is None else sum(rows[: own.rank])  # a slice begins with a new row
        else:
            before = 0 if own is None else own.start
        spec, before_stack = in_stack(spec, bucket.flat.stack)
        return spec, before + before_stack

    @property
    def holdings(self) -> list[Holding]:
        found = []
        buckets = {id(shard): shard.bucket for shard in self._engine.states.shards}
        held_by = {key: Holders(*of.sharding.holders(cut=of.flat.cut)) for key, of in buckets.items()}
        for own in self._engine.states.state_pieces(stored=self._stored):  # as laid out now: see ``use_order``
            start, length = own.tensor.span(own.piece.in_param, own.piece.numel)
            spec, before = self._spec(own.piece.slot.param, own.tensor)
            found.append(Holding(spec, before + start, length, held_by[id(own.shard)]))
        return found

    def values(self) -> Generator[Tensor]:
        return self._engine.states.values(stored=self._stored)

    @property
    def is_new(self) -> bool:
        """True if a load that may fail can fill its state: ``reset`` undoes that."""
        return not self._engine.states.started

    def reset(self) -> None:
        """Reset the state to what it is at construction."""
        self._engine.states.restart({*self._engine.parameters.trained})

    def describe(self) -> list[SavedOptimizer]:
        """Give what the index holds beside tensors: an optimizer for each rule."""
        steps = self._engine.hyper.steps.tolist()  # the host waits for the device
        order = [self._names[index] for index in self._engine.reducer.layout.order]
        found = []
        for rule in self._engine.rules.all:
            groups = {number: {**self._groups[number], **rule.described} for number in self._groups_of(rule)}
            described = _described(groups, self._names_of_groups(rule))
            counts = {self._names[index]: steps[index] for index in self._trained_by(rule)}
            codecs = {name: codec.name for name, codec in rule.codecs.items() if not codec.reads_parameter}
            found.append(SavedOptimizer(f"{_SHARDED}{rule.name}", described, counts, master_of(rule), order, codecs))
        return found

    def _groups_of(self, rule: UpdateRule) -> list[int]:
        return [number for number, own in enumerate(self._engine.rules.by_group) if own is rule]

    def _names_of_groups(self, rule: UpdateRule) -> list[list[str]]:
        names = iter(self._names)
        every = [[next(names) for _ in group["params"]] for group in self._groups]
        return [every[number] for number in self._groups_of(rule)]

    def wanted(self, index: Index, saved_name: Mapping[str, str]) -> list[Wanted]:
        """Say what each rule takes from a checkpoint. ``saved_name``: of each parameter, its name there."""
        trained = self._engine.parameters.trained
        frozen = frozenset(self._names[number] for number, p in trained.items() if not p.requires_grad)
        return [
            Wanted(self._specs_of(rule), self._names_of_groups(rule), master_of(rule), rule.averages, frozen)
            for rule in self._engine.rules.all
        ]

    def groups_of(
        self, saved: Sequence[SavedOptimizer], numbers: Sequence[Sequence[int | None]]
    ) -> list[dict[str, Any]]:
        """Choose the options of each group: those of the saved group of that number; for None, its own. ``saved``,
        ``numbers``: by rule. Raises StateMismatchError for options that this optimizer cannot have."""
        groups = list(self._groups)
        for rule, of, chosen in zip(self._engine.rules.all, saved, numbers, strict=True):
            own = self._groups_of(rule)
            for number, group in zip(own, _chosen([groups[n] for n in own], of, chosen), strict=True):
                groups[number] = group
        for group, before in zip(groups, self._groups, strict=True):
            # Where another number of averages was saved than there is here, the group keeps its own decays.
            if EMA_DECAY in group and len(listed_decays(group[EMA_DECAY])) != len(self._engine.rules.averages):
                del group[EMA_DECAY]
            if EMA_DECAY in before:
                group.setdefault(EMA_DECAY, before[EMA_DECAY])
        check_groups_fit(groups, self._groups, self._engine.rules.by_group)
        return groups

    def use_order(self, saved: Sequence[SavedOptimizer], matched: Match) -> None:
        """Collective. Lay buckets out as they were saved. Gradients may be dropped; nothing else is changed."""
        index_of = {matched.saved_name[name]: index for index, name in enumerate(self._names)}
        names = dict.fromkeys(name for of in saved for name in of.order)
        order = [index_of[name] for name in names if index_of.get(name) in self._engine.parameters.trained]
        self._engine.reducer.restore_order(order)

    def to_fill(self, matched: Match) -> Contents:
        """Give what is to be filled. State that was not saved gets its first values now."""
        steps = [0.0] * len(self._names)
        tensors: dict[int, list[str]] = {}
        rounded: set[str] = set()
        for index, parameter in self._engine.parameters.trained.items():
            name, rule = self._names[index], self._engine.rules.of(index)
            if name in matched.fresh:
                continue
            steps[index] = matched.steps.get(name, 0)
            kinds = [tensor.name for tensor in tensors_for(rule, parameter.dtype)]
            tensors[index] = [kind for kind in kinds if (kind, name) not in matched.begun]
            for kind in tensors[index]:
                source = matched.source.get((kind, name))
                codec = source.codec if isinstance(source, EncodedTensor) else None
                if source is not None and source.spec.dtype == torch.float32 and is_rounded(kind, rule, codec):
                    rounded.add(kind)
        counts = torch.tensor(steps, dtype=torch.float64, device="cpu")
        self._saved = SavedState(tensors, counts, frozenset(rounded))
        self._engine.begin_load(self._saved)  # restarts what was not saved
        return self

    def take_over(self, matched: Match) -> None:
        """Take over the steps, once the tensors are filled."""
        self._engine.end_load(self._saved)


class TorchPart(TensorContents):
    """An optimizer of torch's: whatever tensors its state has, whole on every rank. See ``ShardedPart``."""

    def __init__(self, opt: torch.optim.Optimizer, names: Names, ranks: Ranks) -> None:
        self._opt, self._ranks = opt, ranks
        self._names = {
            id(parameter): names.of(parameter, f"a parameter of group {number}")
            for number, group in enumerate(opt.param_groups)
            for parameter in group["params"]
        }
        found: dict[tuple[str, str], Tensor] = {}
        for parameter, entry in opt.state.items():
            for kind, value in entry.items():
                if kind in (PARAMETER, BUFFER):
                    raise CheckpointError(f"an optimizer calls a part of its state {kind!r}, which has a meaning here")
                if kind != "step":
                    found[kind, names.of(parameter, "a parameter with state")] = value
        super().__init__(found, ranks, Columns())

    is_new = True  # a load fills new tensors, which the optimizer gets in ``take_over``

    def describe(self) -> list[SavedOptimizer]:
        groups = _described(dict(enumerate(self._opt.param_groups)), self._names_of_groups())
        counts = {self._names[id(p)]: entry["step"] for p, entry in self._opt.state.items() if "step" in entry}
        # A float where the optimizer counts in a tensor, as AdamW does: ``take_over`` makes a tensor of it.
        steps = {name: float(count) if isinstance(count, Tensor) else int(count) for name, count in counts.items()}
        return [SavedOptimizer(type(self._opt).__name__, groups, steps)]

    def _names_of_groups(self) -> list[list[str]]:
        return [[self._names[id(parameter)] for parameter in group["params"]] for group in self._opt.param_groups]

    def wanted(self, index: Index, saved_name: Mapping[str, str]) -> list[Wanted]:
        """Want all state that the checkpoint has: before its first step the optimizer has none to compare with."""
        kinds = dict.fromkeys(kind for kind, _ in index.tensors if index.is_state(kind))
        specs = []
        for name in self._names.values():
            there = [index.tensors.get((kind, saved_name[name])) for kind in kinds]
            specs += [TensorSpec(name, saved.spec.kind, saved.spec.shape, saved.spec.dtype) for saved in there if saved]
        own = type(self._opt).__name__
        takes = {own}
        for ours, rule in RULES.items():  # optimizers with the same state
            takes |= {*rule.counterparts, f"{_SHARDED}{ours}"} if own in rule.counterparts else set()
        return [Wanted(specs, self._names_of_groups(), takes=frozenset(takes))]

    def groups_of(
        self, saved: Sequence[SavedOptimizer], numbers: Sequence[Sequence[int | None]]
    ) -> list[dict[str, Any]]:
        return _chosen(self._opt.param_groups, saved[0], numbers[0])

    def to_fill(self, matched: Match) -> Contents:
        place = {self._names[id(p)]: p.device for group in self._opt.param_groups for p in group["params"]}
        self._to_fill = {  # beside the optimizer's own state, which a failed load leaves as it is
            (kind, name): torch.empty(source.spec.shape, dtype=source.spec.dtype, device=place[name])
            for (kind, name), source in matched.source.items()
            if kind not in (PARAMETER, BUFFER) and name in place
        }
        return TensorContents(self._to_fill, self._ranks, Columns())

    def take_over(self, matched: Match) -> None:
        index_of = {name: index for index, name in enumerate(name for of in self._names_of_groups() for name in of)}
        state: dict[int, dict[str, Any]] = {}
        for (kind, name), tensor in self._to_fill.items():
            state.setdefault(index_of[name], {})[kind] = tensor
        for name, count in matched.steps.items():
            if index_of.get(name) in state:
                in_tensor = isinstance(count, float)
                state[index_of[name]]["step"] = torch.tensor(count, device="cpu") if in_tensor else count
        self._opt.load_state_dict({"state": state, "param_groups": self._opt.state_dict()["param_groups"]})


OptimizerPart = ShardedPart | TorchPart
"""An optimizer that is saved and loaded."""

Contents = ShardedPart | TensorContents
"""The tensors of a model, or of an optimizer: ``specs``, the same on every rank, and this rank's ``holdings``."""


class Sharded(Protocol):
    """A ``ShardedOptimizer``, as far as a checkpoint needs it."""

    engine: Engine
    param_groups: list[dict[str, Any]]

    def check_usable(self) -> None: ...
    def settle(self) -> None: ...


def is_sharded(opt: object) -> TypeGuard[Sharded]:
    return isinstance(getattr(opt, "engine", None), Engine)


def _described(groups: Mapping[int, Mapping[str, Any]], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Encode groups, given by number, for the index."""
    described = []
    for (number, group), own in zip(groups.items(), names, strict=True):
        kept = {option: value for option, value in group.items() if option not in ("params", "param_names")}
        described.append({**encode(kept, f"parameter group {number}"), "params": list(own)})
    return described


def _chosen(
    groups: Sequence[dict[str, Any]], saved: SavedOptimizer, numbers: Sequence[int | None]
) -> list[dict[str, Any]]:
    there = [{**decode({**group, "params": None}), "params": group["params"]} for group in saved.groups]
    chosen = [
        copy.copy(group) if number is None else {**there[number], "params": group["params"]}
        for group, number in zip(groups, numbers, strict=True)
    ]
    # JSON has no aliases: an option that is one tensor in several groups, as one rate of all, becomes one tensor again.
    first: dict[int, Tensor] = {}
    for group, options in zip(groups, chosen, strict=True):
        for option, value in options.items():
            if isinstance(value, Tensor) and isinstance(own := group.get(option), Tensor):
                known = first.setdefault(id(own), value)
                if known.dtype == value.dtype and torch.equal(known, value):
                    options[option] = known
    return chosen
