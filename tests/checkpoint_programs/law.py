"""The law of ``zero_optim.checkpoint`` for these programs, written from docs/checkpoint.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from programs.compare import bits, first_difference
from programs.family import Entries
from torch import Tensor

from checkpoint_programs.jobs import Seen
from checkpoint_programs.program import ANCHOR, IN_BF16, Job, Plan, Program

# -- which programs there are --------------------------------------------------------------------------------------


def why_not(program: Program) -> str | None:
    """Why a program is none, or is about what has a test of its own; None: it is one."""
    return next(_reasons(program), None)


def _reasons(program: Program) -> Iterator[str]:
    source, target = program.source, program.target
    if not {program.saving, program.loading} <= {1, 2, 3, 4}:
        yield "one to four ranks"
    if not 0 < len(source.plans) == len(target.plans):
        yield "as many optimizers"
    for job in (source, target):
        for plan in job.plans:
            yield from _of_plan(plan)
        if job.scaler and [plan.rule for plan in job.plans] != ["sharded"]:
            yield "a scaler is for one sharded optimizer"
    if source.scaler != target.scaler:
        yield "both have a scaler, or none"
    if not {name for step in program.steps for name in step.edited} <= source.weights().keys():
        yield "an edit of what is not there"
    if program.with_opt and source.aliases() != target.aliases():
        yield "ties differ: with optimizers that is a test of its own"
    for saved, loaded in zip(source.plans, target.plans, strict=False):
        if loaded.master not in ("fp32", saved.master) or (loaded.master != "fp32" and not program.with_opt):
            yield "a master is rounded: that is a test of its own"
        if loaded.state_dtype not in ("fp32", *IN_BF16, saved.state_dtype):
            yield "8 bits of what had more: that is a test of its own"
    if _frozen_of_torch(source, target):
        yield "an optimizer of torch's keeps the state of what is frozen: that is a test of its own"


def _of_plan(plan: Plan) -> Iterator[str]:
    if not plan.parts:
        yield "no root"
    if plan.rule == "adamw" and (plan.master, plan.state_dtype) != ("fp32", "fp32"):
        yield "torch's optimizers have one form of state"
    if plan.master != "fp32" and plan.dtype != "bf16":
        yield "a split master is of bf16 parameters"
    weights = plan.weights()
    if sorted(name for group in plan.groups for name in group.names) != sorted(weights):
        yield "each weight in one group"
    if not all(group.names for group in plan.groups):
        yield "an empty group"
    if ANCHOR not in weights or weights[ANCHOR].used != "always":
        yield "a root with an anchor"
    if any(weight.used == "ranks" for weight in weights.values()) and plan.rule == "adamw":
        yield "torch's optimizers know no ranks"
    names = [{weight.name for weight in part.weights} for part in plan.parts]
    if not all(t.name in names[t.part] and t.other_name not in names[t.other_part] for t in plan.ties):
        yield "a tie of what is not there"


def _frozen_of_torch(source: Job, target: Job) -> bool:
    before = source.weights()
    return any(
        before[name].trained and not target.weights()[name].trained
        for plan, groups in zip(target.plans, target.groups(), strict=True)
        for name in (name for group in groups for name in group if plan.rule == "adamw")
        if name in before
    )


# -- what has to be seen -------------------------------------------------------------------------------------------


def wrong(program: Program, seen: Sequence[Entries]) -> Iterator[str]:
    """What is not as the page says; ``seen``: of each rank that saves, and then of each that loads."""
    saved: list[dict[str, Seen]] = [dict(entries) for entries in seen[: program.saving]]
    loaded = seen[program.saving :]
    for of_rank in saved:
        yield from _difference("save has changed something", of_rank["before"], of_rank["saved"])
    if len({tuple(word for word, *_ in entries) for entries in loaded}) > 1:
        yield "some ranks refuse what others load"
    for rank, entries in enumerate(loaded):
        yield from _wrong_on_rank(program, rank, saved, entries)


def _wrong_on_rank(program: Program, rank: int, saved: Sequence[dict[str, Seen]], entries: Entries) -> Iterator[str]:
    (_, before), *entries = entries
    own = saved[rank] if program.saving == program.loading else None
    verdict = judge(program, saved[0]["saved"], before, None if own is None else own["saved"].random)
    refused = [entry for entry in entries if entry[0] == "refused"]
    for _, after, _ in refused:
        yield from _difference("a load that was refused has changed something", before, after)
    reasons = f"{verdict.wrong_shape or verdict.misfits}, {[text for *_, text in refused]}"
    if len(refused) not in verdict.refusals:
        yield f"of a strict load and another, {len(refused)} were refused: {reasons}"
        return
    if len(refused) == 2:
        return
    _, after, values, notes = entries[len(refused)]
    yield from _difference(f"loaded: {reasons}, {notes}", verdict.after, after, () if program.with_opt else ("random",))
    if values != (program.seed, {"seed": program.seed}):
        yield f"other values: {values}"
    if not notes and (own is None or refused):
        yield "nothing is said of what was not loaded"
    if program.goes_on and own is not None:
        others = ("buffers",) if rank else ()  # it began with those of rank 0
        yield from _difference("resumed", own["later"], entries[-1][1], others)
    elif program.goes_on:
        for name, value in saved[0]["later"].parameters.items():
            if not torch.allclose(entries[-1][1].parameters[name].float(), value.float(), rtol=2e-2, atol=1e-2):
                yield f"resumed on other ranks: {name}"


def _difference(what: str, want: Seen, have: Seen, leave_out: Sequence[str] = ()) -> Iterator[str]:
    """Where they first differ in bits."""
    names = [field.name for field in fields(Seen) if field.name not in leave_out]
    if found := first_difference(*({name: getattr(seen, name) for name in names} for seen in (want, have)), bits):
        yield f"{what}: {found}"


@dataclass
class Verdict:
    """``misfits``: why a strict load must raise, in words; ``wrong_shape``: why any load must. ``after``: what a load
    that does not raise gives. ``unclear``: where a strict load may raise or not, since the page leaves it open: states
    of parameters that were never updated, which torch's optimizers do not make before."""

    misfits: list[str]
    wrong_shape: list[str]
    after: Seen
    unclear: list[str]

    @property
    def refusals(self) -> set[int]:
        """How many of two loads may be refused, of which the first is strict."""
        return {2} if self.wrong_shape else {1} if self.misfits else {0, 1} if self.unclear else {0}


def canonical(name: str, saved: Seen, aliases: Mapping[str, str]) -> str | None:
    """The name that a parameter was saved under."""
    if name in saved.parameters:
        return name
    return aliases.get(name)


def judge(program: Program, saved: Seen, before: Seen, own_random: Any) -> Verdict:
    """What the load of ``saved`` does with the target, seen ``before``. ``own_random``: what this rank has saved."""
    source, target = program.source, program.target
    misfits: list[str] = []
    wrong_shape: list[str] = []
    unclear: list[str] = []
    aliases = source.aliases()
    after = Seen(
        dict(before.parameters),
        dict(before.buffers),
        [dict(state) for state in before.states],
        [[dict(options) for options in groups] for groups in before.options],
        before.random,
        dict(before.plain),
    )
    masters = effective_masters(saved)
    taken = set()
    for name, own in before.parameters.items():
        source_name = canonical(name, saved, aliases)
        if source_name is None:
            misfits.append(f"parameter {name}")
            continue
        taken.add(source_name)
        value = saved.parameters[source_name]
        if value.shape != own.shape:
            wrong_shape.append(name)
        elif value.dtype == own.dtype:
            after.parameters[name] = value
        else:
            after.parameters[name] = masters.get(source_name, value).to(own.dtype)
    misfits += [f"left over parameter {name}" for name in saved.parameters if name not in taken]
    for name, own_buffer in before.buffers.items():
        if name not in saved.buffers:
            misfits.append(f"buffer {name}")
        elif saved.buffers[name].shape != own_buffer.shape:
            wrong_shape.append(name)
        else:
            after.buffers[name] = saved.buffers[name].to(own_buffer.dtype)
    misfits += [f"left over buffer {name}" for name in saved.buffers if name not in before.buffers]
    if program.with_opt:
        _judge_optimizers(source, target, saved, after, misfits, unclear)
        for key in ("scheduler", "scaler"):
            if (saved.plain[key] is None) != (before.plain[key] is None):
                misfits.append(key)
            elif saved.plain[key] is not None:
                after.plain[key] = saved.plain[key]
        if own_random is not None:
            after.random = own_random
    else:
        for state in after.states:
            for name, entry in state.items():
                if "master" in entry:
                    state[name] = {**entry, "master": settled(entry["master"], after.parameters[name])}
    return Verdict(misfits, wrong_shape, after, unclear)


def effective_masters(saved: Seen) -> dict[str, Tensor]:
    """The masters, and where one does not round to its parameter, which was edited then, the parameter."""
    found = {}
    for state in saved.states:
        for name, entry in state.items():
            if "master" in entry:
                found[name] = settled(entry["master"], saved.parameters[name])
    return found


def settled(master: Tensor, parameter: Tensor) -> Tensor:
    """What the master is, at the latest in the next step, as docs/step.md has it: an edit of the parameter wins."""
    return torch.where(master.to(parameter.dtype) == parameter, master, parameter.float())


def _judge_optimizers(
    source: Job, target: Job, saved: Seen, after: Seen, misfits: list[str], unclear: list[str]
) -> None:
    aliases = source.aliases()
    weights, source_weights, masters = target.weights(), source.weights(), effective_masters(saved)
    for number, (groups, state) in enumerate(zip(target.groups(), after.states, strict=True)):
        state.clear()
        theirs, entries = source.groups()[number], saved.states[number]
        loaded = set()
        for name in (name for group in groups for name in group):
            source_name = canonical(name, saved, aliases)
            if not weights[name].trained or source_name is None:
                continue
            makes_state = "sharded" in (source.plans[number].rule, target.plans[number].rule)
            was_trained = source_weights[source_name].trained and source.plans[number].rule == "sharded"
            if not any(source_name in group for group in theirs):
                misfits.append(f"state of {name}")
            elif source_name not in entries and makes_state and not was_trained:
                unclear.append(f"state of {name}")
            loaded.add(source_name)
            if source_name in entries:
                entry = {
                    **entries[source_name],
                    "master": masters.get(source_name, saved.parameters[source_name].float()),
                }
                state[name] = _converted(entry, after.parameters[name], target.plans[number])
        misfits += [f"left over state of {name}" for name in entries if name not in loaded]
        if len(groups) != len(theirs):
            misfits.append(f"number of groups of optimizer {number}")
        left = {
            place: {canonical(name, saved, aliases) or name for name in group} for place, group in enumerate(theirs)
        }
        for place, group in enumerate(groups):
            mapped = {canonical(name, saved, aliases) or name for name in group}
            if match := [other for other, names in left.items() if names == mapped]:
                after.options[number][place] |= saved.options[number][match[0]]
                del left[match[0]]
            else:
                misfits.append(f"group {place} of optimizer {number}")


def _converted(entry: Mapping[str, Tensor], parameter: Tensor, plan: Plan) -> dict[str, Tensor]:
    """The state of one parameter as the target keeps it: torch's moments have the dtype of the parameter, and those in
    bf16 are rounded."""
    found = {"step": entry["step"].float()}
    moments = torch.float32 if plan.rule == "sharded" else parameter.dtype
    for kind in ("exp_avg", "exp_avg_sq"):
        value = entry[kind].to(torch.bfloat16) if plan.state_dtype in IN_BF16 else entry[kind]
        found[kind] = value.to(moments)
    if plan.rule == "sharded" and parameter.dtype != torch.float32:
        found["master"] = entry["master"]
    return found
