"""``docs/moving.md``: its tables are programs, run line by line; where both sides run they give the same weights."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import zero_optim
from client_cases import EPS, assert_like_adamw
from harness import run_ranks
from sharded_cases import VOCABULARY, Block, Net
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from zero_optim import checkpoint

pytest.importorskip("google_crc32c")

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moving.md"
TABLES = {"From DDP and AdamW": 1, "From FSDP2": 1, "From DeepSpeed": 2, "From apex": 1, "Code that reads .grad": 1}
RUN_ON_THE_LEFT = [*TABLES][:2]
TRAINING = ("accumulate", "the last micro-batch", "clip", "step")  # rows that are run again, after all
LR = 1e-3


@dataclass(frozen=True)
class Row:
    """One line of a table; the code of both sides."""

    topic: str
    left: str
    right: str


def _tables() -> dict[str, list[list[Row]]]:
    """By heading. Raises where a cell is neither code nor one of the words that stand for it."""
    tables: dict[str, list[list[Row]]] = {}
    before = heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif line.startswith("|---"):
            tables.setdefault(heading, []).append([])
        elif line.startswith("| ") and before.startswith("|"):
            topic, left, right = (cell.strip() for cell in line.strip("|").split(" | "))
            tables[heading][-1].append(Row(topic, _code(left), _code(left if right.startswith("the same") else right)))
        before = line
    return tables


def _code(cell: str) -> str:
    if cell == "nothing":
        return ""
    spans = cell.split("<br>")
    assert all(re.fullmatch("`[^`]+`", span) for span in spans), f"not code alone: {cell}"
    return "\n".join(span[1:-1] for span in spans)


class Loss:
    """Called with a model: the loss of this rank's next micro-batch."""

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, 0

    def __call__(self, model: nn.Module) -> Tensor:
        self.calls += 1
        generator = torch.Generator().manual_seed(1000 * self.rank + self.calls)
        tokens = torch.randint(VOCABULARY, (4, 9), generator=generator)
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


class Model(Net):
    """Its head is its own: a parameter on ``meta`` that is tied is made once for each place."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(20, VOCABULARY, bias=False)


def _names(rank: int, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()  # what the right side's ``to`` makes of it
    return {
        **{"torch": torch, "dist": dist, "dcp": dcp, "zero_optim": zero_optim, "checkpoint": checkpoint},
        **{"DistributedDataParallel": DistributedDataParallel, "fully_shard": fully_shard},
        **{"MixedPrecisionPolicy": MixedPrecisionPolicy, "StateDictOptions": StateDictOptions},
        **{"get_model_state_dict": get_model_state_dict, "get_state_dict": get_state_dict},
        **{"set_state_dict": set_state_dict, "Block": Block, "Model": Model},
        **{"get_optimizer_state_dict": get_optimizer_state_dict, "set_model_state_dict": set_model_state_dict},
        **{"set_optimizer_state_dict": set_optimizer_state_dict},
        **{"model": model, "loss": Loss(rank), "device": "cpu", "rank": rank, "dtype": dtype},
    }


@contextlib.contextmanager
def _in_folder(folder: str, rank: int) -> Iterator[None]:
    before = os.getcwd()
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _with_eps(code: str) -> str:
    """Where a gradient is rounding noise, Adam's ratio is anything: see ``client_cases``."""
    return re.sub(r"lr=1e-3", f"lr=1e-3, eps={EPS}", code)


def _run_code(code: str, names: dict[str, Any]) -> None:
    if code.startswith("zero-optim "):
        from zero_optim.cli import main

        assert names["rank"] != 0 or main(code.split()[1:]) == 0
    else:
        exec(compile(_with_eps(code), str(PAGE), "exec"), names)


def _run(rank: int, world_size: int, rows: list[Row], side: str, dtype: torch.dtype, folder: str) -> dict[str, Any]:
    """Every line in turn, and the training ones once more. The weights before and after; ``norm`` and ``held_out``."""
    names = _names(rank, dtype)
    start = {name: value.clone() for name, value in names["model"].state_dict().items()}
    again = [row for row in rows if row.topic in TRAINING]
    with _in_folder(folder, rank):
        for row in [*rows, *again]:
            try:
                _run_code(getattr(row, side), names)
            except BaseException as error:
                error.add_note(f"in the row {row.topic!r}, {side}")
                raise
        opt = names["opt"]
        masters = zero_optim.full_state_dict(opt, rank=None)["state"] if side == "right" else {}
        weights = _weights(names["model"], side, masters)
        if side == "right":
            opt.close()
    numbers = {name: float(names[name]) for name in ("norm", "held_out") if name in names}
    return {"start": start, "weights": weights, **numbers}


def _weights(model: Any, side: str, masters: dict[int, dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole and fp32: the master of a parameter where it has one."""
    if side == "left":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=False)
        whole = get_model_state_dict(getattr(model, "module", model), options=options)
        return {name: value.float() for name, value in whole.items()}
    whole = zero_optim.full_model_state_dict(model, rank=None)
    names = [name for name, _ in model.named_parameters()]
    return whole | {names[index]: state["master"] for index, state in masters.items() if "master" in state}


@pytest.mark.parametrize(
    ("heading", "dtype"),
    [
        ("From DDP and AdamW", torch.float32),
        ("From FSDP2", torch.float32),
        ("From FSDP2", torch.bfloat16),
    ],
    ids=str,
)
def test_both_sides_train_alike(heading: str, dtype: torch.dtype, tmp_path: Path) -> None:
    (rows,) = _tables()[heading]
    theirs = run_ranks(2, _run, rows, "left", dtype, str(tmp_path / "left"), timeout=120)[0]
    ours = run_ranks(2, _run, rows, "right", dtype, str(tmp_path / "right"), timeout=120)[0]
    names = list(theirs["weights"])
    assert any((theirs["weights"][name] - theirs["start"][name]).abs().max() > LR for name in names)  # they train
    if dtype == torch.float32:
        assert_like_adamw([ours["weights"][name] for name in names], theirs["weights"].values(), LR, 2)
        near = 1e-5
    else:  # gradients of micro-batches add up in bf16 here, and in fp32 there
        for name in names:
            assert (ours["weights"][name] - theirs["weights"][name]).abs().mean() < LR / 10, name
        near = 1e-2
    for number in ("norm", "held_out"):
        assert ours[number] == pytest.approx(theirs[number], rel=near), number


@pytest.mark.parametrize(
    ("heading", "number"),
    [("From DeepSpeed", 0), ("From DeepSpeed", 1), ("From apex", 0)],
)
def test_the_right_side_runs(heading: str, number: int, tmp_path: Path) -> None:
    rows = _tables()[heading][number]
    for rank, found in enumerate(run_ranks(2, _run, rows, "right", torch.float32, str(tmp_path))):
        moved = [(found["weights"][name].float() - value).abs().max() for name, value in found["start"].items()]
        assert max(moved) > LR / 2, f"nothing was trained on rank {rank}"


def test_the_tables_are_what_they_were_taken_for() -> None:
    tables = _tables()
    assert {heading: len(of) for heading, of in tables.items()} == TABLES
    for heading in RUN_ON_THE_LEFT:
        topics = {row.topic for row in tables[heading][0]}
        assert {*TRAINING, "freeze", "optimizer", "load", "evaluate"} <= topics
    assert sum(len(rows) for of in tables.values() for rows in of) > 45


def _reads(rank: int, world_size: int, rows: list[Row], side: str) -> dict[str, Any]:
    """The numbers that the table has read, and the weights after its step. On the left: gradients averaged by hand."""
    names = _names(rank, torch.float32)
    for row in rows:
        _run_code(getattr(row, side), names)
        if row.topic == "the last micro-batch" and side == "left":
            for parameter in names["model"].parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
    found = {name: names[name].detach().clone() for name in ("norm", "norms", "importance")}
    return found | {f"weight of {name}": p.detach().clone() for name, p in names["model"].named_parameters()}


def test_code_that_reads_gradients_reads_the_same() -> None:
    (rows,) = _tables()["Code that reads .grad"]
    for theirs, ours in zip(*(run_ranks(2, _reads, rows, side) for side in ("left", "right")), strict=True):
        assert ours.keys() == theirs.keys() and len(ours["norms"]) > 10 and ours["norm"] > 0.1
        for name, value in theirs.items():
            torch.testing.assert_close(
                ours[name], value, rtol=2e-5, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
