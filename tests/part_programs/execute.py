"""Programs of parts as a family: each runs on a sharded model, on the same model at stage 2, and on plain modules."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import zero_optim
from programs.family import Entries, Family, See
from programs.run import execute
from programs.shrink import cuts, put, simpler
from programs.world import brief
from torch import Tensor

from part_programs import words
from part_programs.generate import Op, Program
from part_programs.words import ROWS, H, Words

ATOL, RTOL = 2e-5, 1e-4
BF16_ATOL, BF16_RTOL = 0.05, 0.05


class Parts(Family):
    name = "part_programs"
    seconds = 5.0

    def run(self, program: Program, rank: int, folder: str, see: See) -> None:
        results: dict[int, list[Any]] = {}
        for stage in (2, 0, 3) if program.dtype == "float32" else (2, 3):
            try:
                results[stage] = run_once(rank, program, stage, see)
            except Exception as error:
                raise RuntimeError(f"at stage {stage}: {brief()}") from error
        see(first_difference(program, results))

    def verdict(self, program: Program, seen: Sequence[Entries]) -> str | None:
        return "\n".join(sorted({entries[-1][0] for entries in seen} - {""})) or None

    def kind(self, outcome: str, message: str) -> str:
        """Where it raises, or which two differ."""
        if outcome == "raises" and (stage := re.search(r"at stage \d", message)):
            return f"raises {stage[0]}"
        return message.partition(":")[0] if outcome == "differs" else outcome

    def why_not(self, program: Program) -> str | None:
        return why_not(program)

    def smaller(self, program: Program) -> Iterator[Program]:
        for number, op in enumerate(program.ops):
            for less in _fewer_lines(op):
                yield replace(program, ops=put(program.ops, number, less))
        if program.world > 2:
            yield replace(program, world=2)
        if program.dtype != "float32":
            yield replace(program, dtype="float32")
        yield from simpler(program)

    def script(self, program: Program, title: str) -> str:
        return str(program)


PARTS = Parts()


def _fewer_lines(op: Op) -> Iterator[Op]:
    """Without some lines of a chunk, but for those that end an operation as the law asks."""
    for number, chunk in enumerate(op):
        for lines in cuts(chunk.split("\n")):
            kept = chunk.count("back"), chunk.count("stepped"), chunk.count("opt.zero")
            text = "\n".join(lines)
            if lines and kept == (text.count("back"), text.count("stepped"), text.count("opt.zero")):
                yield put(op, number, text)


def names(says: Words, rank: int, world: int, seed: int) -> dict[str, Any]:
    """What a program's text may use."""

    def data(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + 10 * number + rank)
        return torch.randn(ROWS, H, generator=generator).to(says.dtype)

    @contextlib.contextmanager
    def undone(module: Any) -> Iterator[None]:
        """gather_parameters(writeback=True), in which something raises: on plain modules what is written is kept."""
        if says.sharded:
            with zero_optim.gather_parameters(module, writeback=True):
                yield
            return
        before = [p.detach().clone() for p in module.parameters()]
        try:
            yield
        finally:
            with torch.no_grad():
                for p, values in zip(module.parameters(), before, strict=True):
                    p.copy_(values)

    def full_state(opt: Any) -> Any:
        return opt.state_dict() if says.stage == 0 else zero_optim.full_state_dict(opt, rank=None)

    def load_full_state(opt: Any, state: Any) -> None:
        opt.load_state_dict(state) if says.stage == 0 else zero_optim.load_full_state_dict(opt, state)

    own = {
        name: getattr(says, name)
        for name in ("made", "shard", "optimizer", "see", "back", "stepped", "all_are_shards", "see_all")
    }
    register = zero_optim.register_forward_method
    mine = locals()
    helpers = {name: mine[name] for name in ("undone", "full_state", "load_full_state", "register")}
    return {**vars(words), **own, **helpers, "X": data, "rank": rank, "world": world, "zero_optim": zero_optim}


def run_once(rank: int, program: Program, stage: int, tick: See) -> list[Any]:
    says = Words(stage, getattr(torch, program.dtype), tick)
    torch.manual_seed(10 * program.seed + rank)
    world = dist.get_world_size() if dist.is_initialized() else 1
    ended = execute(str(program), f"<stage {stage}>", names(says, rank, world, program.seed))
    ended["opt"].close()
    return says.seen


def differs(a: list[Any], b: list[Any], atol: float, rtol: float) -> str | None:
    if len(a) != len(b):
        return f"{len(a)} values against {len(b)}"
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape:
            x, y = x.float(), y.float()
            if atol == 0 and not torch.equal(x, y) and not torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)):
                return f"value {index} of {len(a)}: by {float((x - y).abs().max())}"
            if atol and not torch.allclose(x, y, atol=atol, rtol=rtol, equal_nan=True):
                return f"value {index} of {len(a)}: by {float((x - y).abs().max())}"
        elif isinstance(x, Tensor) or isinstance(y, Tensor) or x != y:
            return f"value {index} of {len(a)}: {x!r} against {y!r}"
    return None


def first_difference(program: Program, results: dict[int, list[Any]]) -> str:
    """Of what one rank saw at the stages; its first words are the kind. Empty: there is none."""
    loose = (ATOL, RTOL) if program.dtype == "float32" else (BF16_ATOL, BF16_RTOL)
    if 0 in results and (found := differs(results[0], results[2], ATOL, RTOL)):
        return f"torch and stage 2 differ: {found}"
    if found := differs(results[2], results[3], *loose):
        return f"differs: {found}"
    if not program.clips and (found := differs(results[2], results[3], 0, 0)):
        return f"bits: {found}"
    return ""


@functools.lru_cache(maxsize=10000)
def why_not(program: Program) -> str | None:
    """None, or why plain torch, in one process, does not run it."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            run_once(0, program, 0, lambda: None)
    except Exception:
        return traceback.format_exc()
    return None
