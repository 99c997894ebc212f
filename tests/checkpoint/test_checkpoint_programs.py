"""Random programs save and load checkpoints, and every outcome is that of ``checkpoint_programs.law``, bit for bit.
Beside them: damage, ranks that disagree, what comes back of plain values, and the format."""

from __future__ import annotations

import collections
import fractions
import json
import math
import os
import pickle
import resource
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import numpy
import pytest
import torch
import torch.distributed as dist
from cells import slow_after
from checkpoint_programs.execute import CHECKPOINTS, Checkpoints
from checkpoint_programs.generate import program
from checkpoint_programs.law import why_not
from harness import RankFailure, run_ranks
from programs.compare import same
from programs.run import run_alone
from programs.search import check_all
from programs.shrink import shrink
from safetensors import safe_open
from torch import Tensor, nn
from torch.optim import lr_scheduler

MIB = 1 << 20

# -- random programs -----------------------------------------------------------------------------------------------

PROGRAMS = 5  # ``python -m checkpoint_programs`` runs more


@pytest.mark.parametrize("at", slow_after(1, [range(2), range(2, PROGRAMS)]), ids=str)
@pytest.mark.parametrize(
    ("saving", "loading", "first"), [(1, 1, 1000), (2, 2, 1100), (3, 3, 1200), (2, 3, 1300), (4, 2, 1400), (1, 4, 1500)]
)
def test_programs_obey_the_law(saving, loading, first, at):
    programs = [program(first + seed, saving, loading) for seed in at]
    assert {why_not(made) for made in programs} == {None}
    check_all(CHECKPOINTS, programs, "checkpoints")


class Faulty(Checkpoints):
    """The second job goes on with the random numbers that it had."""

    def run(self, half, rank, folder, see):
        with mock.patch("zero_optim.checkpoint.loading.set_random_states"):
            super().run(half, rank, folder, see)


def test_a_fault_is_found_and_its_program_made_short():
    drawn = program(8, 1, 1)
    assert run_alone(CHECKPOINTS, drawn) is None
    failure = run_alone(Faulty(), drawn)
    assert failure is not None and "[random]" in failure.message
    short = shrink(Faulty(), failure, seconds=2)
    assert len(repr(short.program)) < len(repr(drawn)) and short.kind == failure.kind
    assert "from checkpoint_programs.program import *" in Faulty().script(short.program, "")


# -- a job for the other tests -------------------------------------------------------------------------------------


def _network(seed: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Large enough that the state of each of three ranks has elements of several parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.Linear(40, 9)).to(dtype)


def _trained(seed: int, steps: int = 1, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, Any]:
    import zero_optim

    model = _network(seed, dtype)
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2)
    _train(model, opt, steps)
    return model, opt


def _train(model: nn.Module, opt: Any, steps: int) -> None:
    for step in range(steps):
        inputs = torch.randn(6, 30, generator=torch.Generator().manual_seed(step))
        model(inputs.to(next(model.parameters()).dtype)).float().pow(2).mean().backward()
        opt.step()
        opt.zero_grad()


def _all_of(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    """Collective. Copies of the parameters, the buffers and the state."""
    import zero_optim

    found = {name: value.clone() for name, value in model.state_dict().items()}
    for index, entry in zero_optim.full_state_dict(opt, rank=None)["state"].items():
        found |= {f"{index}: {kind}": value.clone() for kind, value in entry.items()}
    return found


# -- damage --------------------------------------------------------------------------------------------------------


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("exploded", "w")  # into the folder in which the test runs


def _flip(file: str, place: float) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        content = bytearray((step / file).read_bytes())
        content[min(int(place * len(content)), len(content) - 1)] ^= 4
        (step / file).write_bytes(content)

    return damage


def _truncate(file: str, place: float) -> Callable[[Path], None]:
    return lambda step: os.truncate(step / file, int(place * (step / file).stat().st_size))


def _write(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda step: (step / file).write_bytes(content) and None


def _append(file: str) -> Callable[[Path], None]:
    return lambda step: (step / file).write_bytes((step / file).read_bytes() + b"more") and None


def _delete(file: str) -> Callable[[Path], None]:
    return lambda step: (step / file).unlink()


def _edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        index = json.loads((step / "index.json").read_text())
        change(index)
        (step / "index.json").write_text(json.dumps(index))

    return damage


INDEX, FIRST, SECOND = "index.json", "rank-0.safetensors", "rank-1.safetensors"
DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {  # by name: what the error must name, and the damage
    "the last byte of rank 0": (FIRST, _flip(FIRST, 1)),
    "the last byte of rank 1": (SECOND, _flip(SECOND, 1)),
    "a byte late in rank 1": (SECOND, _flip(SECOND, 0.9)),
    **{f"a byte at {place} of the index": (INDEX, _flip(INDEX, place)) for place in (0, 0.03, 0.3, 0.5, 0.8, 1)},
    f"{INDEX} cut at 0.99": (INDEX, _truncate(INDEX, 0.99)),
    **{f"{SECOND} cut at {place}": (SECOND, _truncate(SECOND, place)) for place in (0, 0.5, 0.99)},
    **{f"{file} deleted": (file, _delete(file)) for file in (FIRST, SECOND)},
    **{f"{file} grown": (file, _append(file)) for file in (INDEX, SECOND)},
    **{f"garbage for {file}": (file, _write(file, bytes(range(256)) * 8)) for file in (INDEX, FIRST)},
    **{f"a pickle for {file}": (file, _write(file, pickle.dumps(_Bomb()))) for file in (INDEX, FIRST)},
    "another step": (INDEX, _edit_index(lambda i: i["contents"].update(step=9))),
    "no checksum": (INDEX, _edit_index(lambda i: i.pop("crc32c"))),
    "another version": (INDEX, _edit_index(lambda i: i.update(version=3))),
    "rank 1 of the checkpoint before": (
        SECOND,
        lambda step: shutil.copy(step.parent / "step-1" / SECOND, step / SECOND) and None,
    ),
}


def _load_damaged(rank: int, world_size: int, folder: str, names: list[str]) -> list[str]:
    """What is wrong, in words: each damaged checkpoint is refused, by name, and its folder loads the one before it."""
    from zero_optim import checkpoint
    from zero_optim.errors import CheckpointError

    model, opt = _trained(0)
    checkpoint.save(f"{folder}/whole", model, opt, extra=1)
    expected = _all_of(model, opt)
    _train(model, opt, 1)
    checkpoint.save(f"{folder}/whole", model, opt, extra=2)
    wrong = []
    for name in names:
        file, damage = DAMAGE[name]
        copy = Path(folder, "copy")
        if rank == 0:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(Path(folder, "whole"), copy)
            damage(copy / "step-2")
        dist.barrier()
        other, its_opt = _trained(1)
        before = _all_of(other, its_opt)
        try:
            checkpoint.load(copy / "step-2", other, its_opt)
            wrong.append(f"{name}: it was loaded")
        except CheckpointError as error:
            if file not in str(error):
                wrong.append(f"{name}: {file} is not named in {error}")
        if not same(_all_of(other, its_opt), before):
            wrong.append(f"{name}: it was refused, and something has changed")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = checkpoint.load(copy, other, its_opt)
        if (loaded.step, loaded.extra) != (1, 1) or not same(_all_of(other, its_opt), expected):
            wrong.append(f"{name}: the folder gave something else than the checkpoint before")
        if rank == 0 and not any("step-2" in str(warning.message) for warning in caught):
            wrong.append(f"{name}: no warning")
        its_opt.close()
        dist.barrier()
    return wrong


LIKE_OTHERS = [
    "a byte late in rank 1",
    *(f"a byte at {place} of the index" for place in (0.03, 0.3, 0.8)),
    *(f"{SECOND} cut at {place}" for place in (0, 0.99)),
    f"{FIRST} deleted",
    f"garbage for {FIRST}",
    f"a pickle for {INDEX}",
]


@pytest.mark.parametrize("names", slow_after(1, [sorted(DAMAGE.keys() - LIKE_OTHERS), LIKE_OTHERS]), ids=len)
def test_damage_is_named_and_the_checkpoint_before_is_loaded(tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    for wrong in run_ranks(2, _load_damaged, str(tmp_path), names):
        assert not wrong
    assert not list(tmp_path.rglob("exploded"))


def test_an_index_of_deep_nesting_is_damage(tmp_path):
    from zero_optim import checkpoint
    from zero_optim.errors import CheckpointError

    model = _network(0)
    checkpoint.save(tmp_path, model, step=1)
    (checkpoint.save(tmp_path, model, step=2) / INDEX).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=INDEX):
        checkpoint.load(tmp_path / "step-2", model)
    with pytest.warns(match="step-2"):
        assert checkpoint.load(tmp_path, model).step == 1


# -- ranks that do different things --------------------------------------------------------------------------------


class _Stateful:
    """A data loader, or a scheduler, that takes a state, or raises what it is given."""

    def __init__(self, state: Any = None, loading: Exception | None = None) -> None:
        self.state, self.loading = state, loading

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if self.loading is not None:
            raise self.loading
        self.state = state


def _function() -> None:
    """What cannot be saved without pickle."""


class _Growing(nn.Module):
    def __init__(self, inner: nn.Module, grown: bool) -> None:
        super().__init__()
        self.inner = inner
        if grown:
            self.register_buffer("more", torch.ones(3))


def _disagreements(odd: bool, rank: int, folder: str, model: nn.Module, opt: Any) -> dict[str, Callable[[], Any]]:
    """Calls that differ on the odd rank, each of which all ranks must refuse."""
    from zero_optim import checkpoint

    def saves(**options: Any) -> Callable[[], Any]:
        return lambda: checkpoint.save(options.pop("path", f"{folder}/good"), model, opt, **options)

    def loads(path: Any = f"{folder}/good", model: nn.Module = model, opt: Any = opt, **options: Any) -> Any:
        return lambda: checkpoint.load(path, model, opt, **options)

    boom = ValueError("boom") if odd else None
    return {
        "save: a step that is none": saves(step="x" if odd else 6),
        "save: extra that cannot be saved": saves(step=7, extra=_function if rank == 0 else {}),
        "save: data without a state": saves(step=7, data=5 if odd else _Stateful()),
        "save: a scheduler without a state": saves(step=7, scheduler=5 if odd else _Stateful()),
        "save: keep_last of nothing": saves(step=7, keep_last=0 if odd else 1),
        "save: a path below a file": saves(step=7, path=f"{folder}/good/step-1/index.json/below"),
        "save: no optimizer": lambda: checkpoint.save(f"{folder}/good", model, None if odd else opt, step=7),
        "save: another model": lambda: checkpoint.save(
            f"{folder}/good", nn.Linear(2, 2) if odd else nn.Linear(2, 3), step=7
        ),
        "load: strict, which does not fit": loads(scheduler=_Stateful(), strict=odd),
        "load: a scheduler": loads(scheduler=_Stateful() if odd else None),
        "load: data": loads(data=_Stateful() if odd else None),
        "load: a buffer": loads(model=_Growing(model, odd), opt=None),
        "load: the state of a scheduler raises": loads(f"{folder}/more", scheduler=_Stateful(loading=boom)),
        "load: nothing is there": loads(f"{folder}/nothing"),
        # From here on one by one: a rank that waits for others in vain takes the process group with it.
        "load: no optimizer": loads(opt=None if odd else opt),
        "load: the state of data raises": loads(f"{folder}/data", data=_Stateful(loading=boom)),
        "save: a path that is none": saves(step=7, path=5 if odd else f"{folder}/good"),
        "save: no model": lambda: checkpoint.save(f"{folder}/good", None if odd else model, opt, step=7),
        "save: no optimizer but a text": lambda: checkpoint.save(
            f"{folder}/good", model, "opt" if odd else opt, step=7
        ),
        "save: data": saves(step=7, data=_Stateful() if odd else None),
    }


DISAGREEMENTS = [
    "save: a step that is none",
    "save: extra that cannot be saved",
    "save: data without a state",
    "save: a scheduler without a state",
    "save: keep_last of nothing",
    "save: a path below a file",
    "save: no optimizer",
    "save: another model",
    "load: strict, which does not fit",
    "load: a scheduler",
    "load: data",
    "load: a buffer",
    "load: the state of a scheduler raises",
    "load: nothing is there",
]
ONE_BY_ONE = [
    "load: no optimizer",
    "load: the state of data raises",
    "save: a path that is none",
    "save: no model",
    "save: no optimizer but a text",
    "save: data",
]


def _disagree(rank: int, world_size: int, folder: str, odd: int, names: list[str]) -> list[str]:
    """What is wrong, in words: after each call that is refused the checkpoint from before is whole, and loads."""
    from zero_optim import checkpoint
    from zero_optim.errors import CollectiveError

    model, opt = _trained(0)
    checkpoint.save(f"{folder}/good", model, opt)
    checkpoint.save(f"{folder}/more", model, opt, scheduler=_Stateful(1))
    checkpoint.save(f"{folder}/data", model, opt, data=_Stateful(rank))
    expected = _all_of(model, opt)
    calls = _disagreements(rank == odd, rank, folder, model, opt)
    wrong = []
    for name in names:
        try:
            calls[name]()
            wrong.append(f"{name}: rank {rank} did not raise")
        except CollectiveError as error:
            wrong.append(f"{name}: rank {rank} has waited for the time-out: {error}"[:300])
        except Exception as error:
            if not str(error):
                wrong.append(f"{name}: {error!r} says nothing")
        dist.barrier()
        if name.startswith("save"):
            other, its_opt = _trained(1)
            loaded = checkpoint.load(f"{folder}/good", other, its_opt)
            if loaded.step != 1 or not same(_all_of(other, its_opt), expected):
                wrong.append(f"{name}: the checkpoint from before is step {loaded.step}, or has other bits")
            its_opt.close()
    checkpoint.save(f"{folder}/good", model, opt, step=50)
    if sorted(os.listdir(f"{folder}/good")) != ["step-1", "step-50"]:
        wrong.append(f"left: {os.listdir(f'{folder}/good')}")
    return wrong


def test_ranks_that_disagree_all_raise(tmp_path):
    for wrong in run_ranks(3, _disagree, str(tmp_path), 1, DISAGREEMENTS):
        assert not wrong


@pytest.mark.parametrize("name", ONE_BY_ONE)
def test_ranks_that_disagree_all_raise_one_by_one(tmp_path, name):
    for wrong in run_ranks(2, _disagree, str(tmp_path), 1, [name], collective_timeout=4):
        assert not wrong


def _full_disk(rank: int, world_size: int, folder: str) -> tuple[str, list[str], list[str], int]:
    """The error of a save for which rank 1 has no room, what it left, what the next save left, and what loads."""
    from zero_optim import checkpoint
    from zero_optim.errors import CheckpointError

    model, opt = _trained(0)
    checkpoint.save(folder, model, opt)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            checkpoint.save(folder, model, opt, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    step = checkpoint.load(folder, model, opt).step
    dist.barrier()
    checkpoint.save(folder, model, opt, step=3)
    return str(caught.value), sorted(os.listdir(folder)), sorted(os.listdir(f"{folder}/step-3")), step


def test_a_full_disk_of_one_rank(tmp_path):
    for message, left, files, step in run_ranks(2, _full_disk, str(tmp_path)):
        assert SECOND in message and "bytes" in message
        assert (left, files, step) == (["step-1", "step-3"], [INDEX, FIRST, SECOND], 1)


class _Dies:
    def state_dict(self) -> Any:
        os._exit(7)


def _save_and_die(rank: int, world_size: int, folder: str) -> None:
    from zero_optim import checkpoint

    model, opt = _trained(0)
    checkpoint.save(folder, model, opt)
    checkpoint.save(folder, model, opt, step=2, data=_Dies() if rank == 1 else _Stateful())


def _load_only(rank: int, world_size: int, folder: str) -> tuple[int, bool]:
    from zero_optim import checkpoint

    model, opt = _trained(0)
    other, its_opt = _trained(1)
    step = checkpoint.load(folder, other, its_opt).step
    return step, same(_all_of(other, its_opt), _all_of(model, opt))


def test_a_rank_that_dies_leaves_the_checkpoint_from_before(tmp_path):
    with pytest.raises(RankFailure, match="died with exit code 7") as failure:
        run_ranks(2, _save_and_die, str(tmp_path), collective_timeout=5)
    assert "did not finish" not in str(failure.value)
    assert run_ranks(2, _load_only, str(tmp_path)) == [(1, True)] * 2


# -- the folder ----------------------------------------------------------------------------------------------------


def _steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keep_last_removes_older_ones_and_nothing_else(tmp_path):
    from zero_optim import checkpoint

    model = _network(0)
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, model, step=step)
    (tmp_path / "step-10" / INDEX).unlink()
    for name in ("step-best", "step-1.bak", "notes", "Step-1"):
        (tmp_path / name).mkdir()
    (tmp_path / ".writing-step-5").mkdir()
    checkpoint.save(tmp_path, model, step=11, keep_last=2)
    assert {"step-2", "step-11", "step-best", "step-1.bak", "notes", "Step-1"} <= set(_steps(tmp_path))
    assert not {"step-1", ".writing-step-5"} & set(_steps(tmp_path))
    assert checkpoint.save(tmp_path, model, step=6, keep_last=1).exists()
    assert {"step-6", "step-11"} <= set(_steps(tmp_path)) and "step-2" not in _steps(tmp_path)
    latest = checkpoint.latest(tmp_path)
    assert latest is not None and latest.name == "step-6"  # it was saved last


def test_a_folder_of_ones_own_is_not_removed(tmp_path):
    from zero_optim import checkpoint

    for name in ("step-003", "step-3"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    (tmp_path / ".writing-letters").mkdir()
    checkpoint.save(tmp_path, _network(0), step=4, keep_last=1)
    assert _steps(tmp_path) == [".writing-letters", "step-003", "step-3", "step-4"]


# -- plain values --------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {
    "constants": [None, True, False, 0, -1, 10**30, "", "ü \ud800 \0 😀", b"", b"\xff\0"],
    "floats": [math.inf, -math.inf, math.nan, -0.0, 5e-324, 1e308],
    "nested": {"a": [1, (2, [b"x", {"k": ()}], ((),))], "b": {}},
    "keys": {1: "int", "1": "str", 2.5: "float", (1, "a"): "tuple", None: "none", b"b": "bytes", False: "bool"},
    "counter": collections.Counter("abca"),
    "tensors": [
        torch.randn(3, 4).bfloat16(),
        torch.tensor(1.5, dtype=torch.float16),
        torch.zeros(0, 3),
        torch.tensor([True, False]),
        torch.tensor(-3),
        torch.randn(4, 5).t(),
        torch.randn(2, dtype=torch.complex64),
        torch.tensor([math.nan, -0.0]),
        torch.zeros(MIB // 4),
        torch.zeros(10_000_000)[:2],
    ],
    "what looks like the writing of others": [
        {"$tuple": [1]},
        {"$tensor": "AA"},
        {"$bytes": "AA=="},
        {"$dict": []},
        {"$counter": []},
        {"$float": "nan"},
        {"__tuple__": [1]},
    ],
    "much": [list(range(3000)), "x" * 100_000, b"x" * 100_000],
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_values_come_back_as_they_were(tmp_path, name):
    from zero_optim import checkpoint

    checkpoint.save(tmp_path, _network(0), step=1, extra=PLAIN[name])
    assert same(checkpoint.load(tmp_path, _network(1)).extra, PLAIN[name])


def test_what_the_index_writes_is_a_plain_value_too(tmp_path):
    """A value is written, and what was written is a value again, and so on: no two of them are mixed up."""
    from zero_optim import checkpoint

    model = _network(0)
    value: Any = {name: PLAIN[name] for name in ("floats", "nested", "keys", "counter")}
    for step in range(3):
        path = checkpoint.save(tmp_path, model, step=step, extra=value)
        assert same(checkpoint.load(path, model).extra, value)
        value = json.loads((path / INDEX).read_text())["contents"]["extra"]


def _cyclic() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


NOT_PLAIN: dict[str, Callable[[], Any]] = {
    "a function": lambda: _function,
    "a set": lambda: {1},
    "a path": lambda: Path("a"),
    "an array": lambda: numpy.zeros(3),
    "a dtype": lambda: torch.float32,
    "a complex number": lambda: 1j,
    "a large tensor": lambda: torch.zeros(MIB // 4 + 1),
    "a sparse tensor": lambda: torch.eye(2).to_sparse(),
    "a tensor without values": lambda: torch.empty(2, device="meta"),
    "a fraction": lambda: fractions.Fraction(1, 3),
    "an ordered dict": lambda: collections.OrderedDict(a=1),
    "a defaultdict": lambda: collections.defaultdict(int, a=1),
    "a bytearray": lambda: bytearray(b"a"),
    "a list in itself": _cyclic,
    "a tensor of quantized numbers": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "a conjugate view": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "a number of many digits": lambda: 10**5000,
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_raises_or_comes_back(tmp_path, name):
    """TypeError, which says where it is, and nothing is written; or what comes back is of the same type and equal."""
    from zero_optim import checkpoint

    value = NOT_PLAIN[name]()
    if name in ("an ordered dict", "a bytearray", "a conjugate view"):
        checkpoint.save(tmp_path, _network(0), step=1, extra={"a": [value]})
        assert same(checkpoint.load(tmp_path, _network(0)).extra, {"a": [value]})
        return
    with pytest.raises(TypeError, match=r"extra\['a'\]\[0\]"):
        checkpoint.save(tmp_path, _network(0), step=1, extra={"a": [value]})
    assert checkpoint.latest(tmp_path) is None


class _Decay:
    def __init__(self, factor: float = 0.9) -> None:
        self.factor = factor

    def __call__(self, epoch: int) -> float:
        return self.factor**epoch


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, _Decay()),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3, 3, 4]),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 20),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.MultiStepLR(o, [1, 2])], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
}


def _go_on(model: nn.Module, opt: Any, scheduler: Any, steps: int) -> list[Any]:
    rates = []
    for _ in range(steps):
        _train(model, opt, 1)
        scheduler.step(*((1.0,) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()))
        rates.append([(float(group["lr"]), tuple(group["betas"])) for group in opt.param_groups])
    return rates


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_goes_on(tmp_path, name):
    from zero_optim import checkpoint

    model, opt = _trained(0, steps=0)
    scheduler = SCHEDULERS[name](opt)
    _go_on(model, opt, scheduler, 3)
    checkpoint.save(tmp_path, model, opt, scheduler=scheduler)
    expected = _go_on(model, opt, scheduler, 4), _all_of(model, opt)
    other, its_opt = _trained(1, steps=0)
    its_scheduler = SCHEDULERS[name](its_opt)
    _go_on(other, its_opt, its_scheduler, 1)
    checkpoint.load(tmp_path, other, its_opt, scheduler=its_scheduler)
    assert same((_go_on(other, its_opt, its_scheduler, 4), _all_of(other, its_opt)), expected)


# -- optimizers of torch -------------------------------------------------------------------------------------------

TORCHS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "AdamW, a tensor for lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "SGD": lambda p: torch.optim.SGD(p),
    "SGD, momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", TORCHS)
def test_an_optimizer_of_torch_goes_on(tmp_path, name):
    from zero_optim import checkpoint

    model, other = _network(0, torch.float32), _network(1, torch.float32)
    opt, its_opt = (TORCHS[name](m.parameters()) for m in (model, other))
    _train(model, opt, 2)
    checkpoint.save(tmp_path, model, opt, step=2)
    checkpoint.load(tmp_path, other, its_opt)
    saved, loaded = opt.state_dict(), its_opt.state_dict()
    for index, entry in saved["state"].items():
        assert all(same(loaded["state"][index][kind], value) for kind, value in entry.items())
    for one in (model, opt), (other, its_opt):
        _train(*one, 2)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


class _Three(nn.Module):
    def __init__(self, seed: int, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7))
        self.third = self.first if tied else nn.Parameter(torch.randn(5, 3))
        self.second.requires_grad_(not frozen)


def _three(
    rule: str, seed: int, unused: tuple[str, ...] = (), steps: int = 1, **options: bool
) -> tuple[nn.Module, Any]:
    import zero_optim

    model = _Three(seed, **options)
    opt: Any = (
        zero_optim.ShardedAdamW(model.named_parameters())
        if rule == "sharded"
        else torch.optim.AdamW(model.parameters())
    )
    for _ in range(steps):
        sum((p * p).sum() for name, p in model.named_parameters() if p.requires_grad and name not in unused).backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def _moments(opt: Any) -> list[Tensor]:
    import zero_optim

    state = zero_optim.full_state_dict(opt) if isinstance(opt, zero_optim.ShardedAdamW) else opt.state_dict()
    return [state["state"][index]["exp_avg"] for index in sorted(state["state"])]


RULES = ("sharded", "adamw")


@pytest.mark.parametrize("target", RULES)
@pytest.mark.parametrize("source", RULES)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_that_was_never_updated_is_not_missed(tmp_path, source, target, steps):
    """As a strict load does not count such a state where it is left over."""
    from zero_optim import checkpoint

    model, opt = _three(source, 0, unused=("second",), steps=steps)
    other, its_opt = _three(target, 1, steps=0)
    checkpoint.save(tmp_path, model, opt, step=steps)
    checkpoint.load(tmp_path, other, its_opt)
    assert same(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("source", RULES)
def test_the_state_of_a_parameter_that_is_frozen_now_is_left_over(tmp_path, source):
    """Not of an optimizer of torch's, which keeps it."""
    from zero_optim import StateMismatchError, checkpoint

    checkpoint.save(tmp_path, *_three(source, 0), step=1)
    model, opt = _three("sharded", 1, steps=0, frozen=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match="second"):
        checkpoint.load(tmp_path, model, opt)
    assert same(dict(model.state_dict()), before)
    assert any("second" in note for note in checkpoint.load(tmp_path, model, opt, strict=False).notes)


@pytest.mark.parametrize("target", RULES)
@pytest.mark.parametrize("strict", [True, False])
def test_where_a_tie_is_gone_both_get_the_saved_values(tmp_path, target, strict):
    from zero_optim import checkpoint

    model, opt = _three("sharded", 0, tied=True)
    checkpoint.save(tmp_path, model, opt)
    other, its_opt = _three(target, 1)
    checkpoint.load(tmp_path, other, its_opt, strict=strict)
    assert same(
        [p.detach() for p in other.parameters()], [model.first.detach(), model.second.detach(), model.first.detach()]
    )
    saved = _moments(opt)
    assert same(_moments(its_opt), [saved[0], saved[1], saved[0]])


def test_a_tie_that_is_new_leaves_the_second_over(tmp_path):
    from zero_optim import StateMismatchError, checkpoint

    model, opt = _three("sharded", 0)
    checkpoint.save(tmp_path, model, opt)
    other, its_opt = _three("sharded", 1, tied=True)
    with pytest.raises(StateMismatchError, match="third"):
        checkpoint.load(tmp_path, other, its_opt)
    assert any("third" in note for note in checkpoint.load(tmp_path, other, its_opt, strict=False).notes)
    assert same(other.first.detach(), model.first.detach())


def test_buffers_that_state_dict_leaves_out_are_not_saved(tmp_path):
    from zero_optim import checkpoint

    model, other = nn.Module(), nn.Module()
    for module, value in ((model, 1.0), (other, 2.0)):
        module.register_buffer("table", torch.full((3,), value), persistent=False)
    checkpoint.save(tmp_path, model, step=1)
    checkpoint.load(tmp_path, other)
    assert other.table.tolist() == [2.0] * 3


def test_the_error_is_public():
    import zero_optim

    assert issubclass(zero_optim.CheckpointError, zero_optim.ZeroOptimError)


# -- the format ----------------------------------------------------------------------------------------------------


def _save_large(rank: int, world_size: int, folder: str, stage: int) -> dict[str, dict[str, Tensor]]:
    """A checkpoint with a parameter of more than 1 MiB, as whole tensors by kind and name."""
    import zero_optim
    from zero_optim import checkpoint

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(700, 701), nn.BatchNorm1d(701), nn.Linear(701, 3)).bfloat16()
    model.register_buffer("counts", torch.arange(5))
    model.register_parameter("nothing", nn.Parameter(torch.zeros(0, 2, dtype=torch.bfloat16)))
    model.register_parameter("one", nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16)))
    if stage == 3:
        zero_optim.shard_module(model, units=(nn.Linear,))
    opt = zero_optim.ShardedAdamW(model.named_parameters(), stage=None if stage == 3 else stage)
    model(torch.randn(4, 700).bfloat16()).float().pow(2).sum().backward()
    opt.step()
    checkpoint.save(folder, model, opt)
    names = [name for name, _ in model.named_parameters()]
    with zero_optim.gather_parameters(model):
        found = {"parameter": {name: p.detach().clone() for name, p in model.named_parameters()}}
    found["buffer"] = {name: b.clone() for name, b in model.named_buffers()}
    for index, entry in zero_optim.full_state_dict(opt, rank=None)["state"].items():
        for kind in entry.keys() - {"step"}:
            found.setdefault(kind, {})[names[index]] = entry[kind]
    return found


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 0), (3, 2), (3, 3)])
def test_the_files_are_as_the_page_says(tmp_path, world_size, stage):
    expected = run_ranks(world_size, _save_large, str(tmp_path), stage)[0]
    step = tmp_path / "step-1"
    index = json.loads((step / INDEX).read_text())
    assert (index["format"], index["version"]) == ("zero-optim checkpoint", 1)
    contents = index["contents"]
    assert contents["step"] == 1 and len(contents["ranks"]) == world_size
    assert {path.name for path in step.iterdir()} == {INDEX, *contents["files"]}
    assert set(contents["files"]) <= {f"rank-{rank}.safetensors" for rank in range(world_size)}
    files = {name: (step / name).read_bytes() for name in contents["files"]}
    assert {name: len(content) for name, content in files.items()} == contents["files"]
    named: set[tuple[str, str]] = set()
    for tensor in contents["tensors"]:
        kind, name, dtype = tensor["kind"], tensor["name"], getattr(torch, tensor["dtype"])
        assert tensor["shape"] == list(torch.Size(tensor["shape"])) and (kind, name) not in {
            key for key in named if not key[0].startswith("piece")
        }
        named.add((kind, name))
        pieces, flat, end = sorted(tensor["pieces"], key=lambda piece: piece["start"]), [], 0
        for piece in pieces:
            assert piece["start"] == end and piece["length"] > 0, "each element is in exactly one piece"
            end += piece["length"]
            size = piece["length"] * dtype.itemsize
            content = files[piece["file"]][piece["offset"] : piece["offset"] + size]
            sums = [google_crc32c.value(content[at : at + MIB]) for at in range(0, size, MIB)]
            assert [int(text, 16) for text in piece["crc32c"]] == sums
            with safe_open(step / piece["file"], framework="pt") as opened:
                one = opened.get_tensor(f"{kind}:{name}:{piece['start']}")
            assert one.ndim == 1 and one.dtype == dtype
            assert same(one, torch.frombuffer(bytearray(content), dtype=dtype))
            flat.append(one)
        assert end == math.prod(tensor["shape"])
        if name in expected.get(kind, {}):
            whole = torch.cat(flat) if flat else torch.empty(0, dtype=dtype)
            assert same(whole.view(tensor["shape"]), expected[kind][name]), f"{kind} of {name}"
    assert named >= {(kind, name) for kind, tensors in expected.items() for name in tensors}
    in_files = {key for file in files for key in safe_open(step / file, framework="pt").keys()}  # noqa: SIM118
    pieces_of = {f"{t['kind']}:{t['name']}:{p['start']}" for t in contents["tensors"] for p in t["pieces"]}
    assert in_files == pieces_of
    steps = contents["optimizers"][0]["steps"]
    assert steps["0.weight"] == 1 and steps["one"] == 0
