"""The law itself: runs a program with no store and with its stores on the ranks of one process group, and compares."""

from __future__ import annotations

import os
import shutil
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from guards import open_files_in
from torch import Tensor

from store_programs.execute import Machine, Trace
from store_programs.generate import Program

NONE: dict[str, Any] = {"state_offload": None}
BROKEN = "the ranks could not be compared"  # one died, hung, or waited in vain for another
LONGEST_PATH_OF_A_STEP = 0.5  # in parameters, by which an update near a gradient of zero may differ from torch's


@dataclass
class Verdict:
    """What one rank found in one program: ``difference`` is empty where the law holds."""

    difference: str = ""
    ended: str = ""  # what the run without a store raised, if it raised
    entries: int = 0
    speculated: Counter[str] = field(default_factory=Counter)


def bits(value: Tensor) -> bytes:
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def first_difference(expected: Any, got: Any, path: str = "") -> str:
    """Where two values differ, and by what; empty where they have the same bits."""
    if isinstance(expected, Tensor) and isinstance(got, Tensor):
        if expected.dtype != got.dtype or expected.numel() != got.numel():
            return f"{path}: {expected.dtype} {expected.numel()}, not {got.dtype} {got.numel()}"
        if not expected.numel() or bits(expected) == bits(got):
            return ""
        where = int((expected != got).nonzero().flatten()[0]) if bool((expected != got).any()) else 0
        return f"{path}[{where}]: expected {expected[where].item()!r}, got {got[where].item()!r}"
    if isinstance(expected, dict) and isinstance(got, dict):
        if expected.keys() != got.keys():
            return f"{path}: expected the keys {list(expected)}, got {list(got)}"
        return next(filter(None, (first_difference(expected[k], got[k], f"{path}/{k}") for k in expected)), "")
    if isinstance(expected, list) and isinstance(got, list) and len(expected) == len(got):
        pairs = enumerate(zip(expected, got, strict=True))
        return next(filter(None, (first_difference(a, b, f"{path}/{n}") for n, (a, b) in pairs)), "")
    return "" if type(expected) is type(got) and expected == got else f"{path}: expected {expected!r}, got {got!r}"


def compare(expected: Trace, got: Trace) -> str:
    for (label, value), (other_label, other) in zip(expected, got, strict=False):
        if label != other_label:
            return f"expected {label!r} ({_short(value)}), got {other_label!r} ({_short(other)})"
        if difference := first_difference(value, other):
            return f"{label}{difference}"
    if len(expected) != len(got):
        longer = expected if len(expected) > len(got) else got
        return f"one run has more to show: {longer[min(len(expected), len(got))][0]!r}"
    return ""


def _short(value: Any) -> str:
    return repr(value)[:80]


def judge(program: Program, rank: int, folder: str) -> Verdict:
    """Collective, on the ranks of the program."""
    reference, expected = _run(program, rank, [NONE], folder)
    verdict = Verdict(ended=getattr(reference, "message", ""), entries=len(expected))
    for number, stores in enumerate(program["runs"]):
        machine, got = _run(program, rank, stores, folder)
        verdict.speculated.update(machine.speculated)
        difference = compare(expected, got) or _files_left(folder, rank)
        if difference and not verdict.difference:
            said = getattr(machine, "message", "")
            verdict.difference = f"run {number} {stores}: {difference}" + (f"\n  it raised: {said}" if said else "")
        if _any(bool(difference)):
            break
    return verdict


def judge_plain(program: Program, rank: int, folder: str) -> Verdict:
    """The program of one rank in fp32 against torch.optim.AdamW, within what rounding may make of it."""
    reference = Machine(program, rank, [], folder)
    expected = reference.run()
    _, got = _run(program, rank, [NONE], folder)
    verdict = Verdict(ended=getattr(reference, "message", ""), entries=len(expected))
    seen = {label: value for label, value in got if label.endswith(": parameters")}
    for before, after in [(value, seen[label]) for label, value in expected if label in seen][-1:]:
        for name, tensor in before.items():
            far = (tensor - after[name]).abs().max().item()
            if not far < LONGEST_PATH_OF_A_STEP * program["config"]["lr"]:
                verdict.difference = verdict.difference or f"{name} is {far} from torch.optim.AdamW's"
    return verdict


def _run(program: Program, rank: int, stores: list[dict[str, Any]], folder: str) -> tuple[Machine, Trace]:
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(f"{folder}/pages")
    _any(False)
    machine = Machine(program, rank, stores, folder)
    trace = machine.run()
    _any(False)
    return machine, trace


def _files_left(folder: str, rank: int) -> str:
    left = [str(path) for path in Path(folder, "pages").rglob("*") if path.is_file()] + open_files_in(f"{folder}/pages")
    return f"files are left after close: {left}" if left else ""


def _any(value: bool) -> bool:
    flag = torch.tensor([float(value)])
    if dist.is_initialized():
        dist.all_reduce(flag)
    return bool(flag.item())


def judge_all(rank: int, world: int, programs: list[Program], folder: str, plain: bool = False) -> list[Verdict]:
    """For ``run_ranks``. A program after which the ranks have not the same to say is the last of its process group."""
    verdicts = []
    for number, program in enumerate(programs):
        Path(folder, f"at-{rank}").write_text(str(number))
        try:
            verdicts.append((judge_plain if plain else judge)(program, rank, f"{folder}/files"))
        except Exception:
            verdicts.append(Verdict(difference=f"{BROKEN}: {traceback.format_exc()}"))
            break
        if _any(bool(verdicts[-1].difference)):
            break
    return verdicts
