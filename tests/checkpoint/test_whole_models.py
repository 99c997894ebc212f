"""Whole models without whole memory: parameter by parameter, as Hugging Face's files, from them; and ``inspect``."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import zero_optim
from checkpoint_cases import Cell, Job, Zoo, assert_bits, flip, look, make_zoo, train_zoo
from checkpoint_files import read_contents
from guards import open_files_in
from harness import run_ranks
from sharded_cases import allocated, gathered
from torch import Tensor, nn
from zero_optim import (
    CheckpointError,
    ShardAccessError,
    ShardedAdamW,
    StateMismatchError,
    checkpoint,
    iter_full_parameters,
    load_safetensors,
    shard_module,
)
from zero_optim.cli import main

# -- iter_full_parameters ----------------------------------------------------------------------------------------------


def iterate(rank: int, world_size: int, job: Job, dtype: torch.dtype | None, with_opt: bool) -> tuple[Any, Any]:
    model, opt = make_zoo(job, seed=rank)
    train_zoo(model, opt, range(2), rank, world_size)
    given = [(name, whole.clone()) for name, whole in iter_full_parameters(model, opt if with_opt else None, dtype)]
    train_zoo(model, opt, range(2, 3), rank, world_size)  # it has left nothing behind
    return given, None


def seen(rank: int, world_size: int, job: Job) -> Any:
    model, opt = make_zoo(job, seed=rank)
    train_zoo(model, opt, range(2), rank, world_size)
    return look(model, opt)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "with_opt"), [(None, False), (torch.float32, True), (torch.float32, False), (torch.bfloat16, True)]
)
def test_every_parameter_comes_once(ranks: int, stage: int, dtype: torch.dtype | None, with_opt: bool) -> None:
    job = Job(stage=stage, dtype=torch.bfloat16, cap=0.001)
    expected = run_ranks(ranks, seen, job)[0]
    all_given = [given for given, _ in run_ranks(ranks, iterate, job, dtype, with_opt)]
    orders = [[name for name, _ in given] for given in all_given]
    assert all(order == orders[0] for order in orders)
    given = dict(all_given[0])
    assert len(given) == len(orders[0]) and given.keys() == {name for name, _ in Zoo().named_parameters()}
    for name, whole in given.items():
        precise = with_opt and dtype is torch.float32 and name in expected.state
        value = expected.state[name]["master"] if precise else expected.values[name]
        assert whole.dtype == (dtype or torch.bfloat16) and torch.equal(whole, value.to(whole.dtype)), name


def peak(rank: int, world_size: int) -> tuple[int, int, int]:
    """Bytes at most, of the largest unit, and of the model."""
    model = nn.Sequential(*(nn.Linear(100, 100) for _ in range(16)))
    shard_module(model, [nn.Linear])
    total = sum(parameter.numel() for parameter in model.parameters()) * 4

    def consume() -> None:
        for _, whole in iter_full_parameters(model):
            whole.sum()

    consume()
    return allocated(consume).peak, 4 * 10_100, total


def test_it_takes_memory_for_one_unit() -> None:
    """And for a tensor. gloo's thread may let go of the unit before only when this one has been gathered."""
    for most, unit, total in run_ranks(2, peak):
        assert most < 3.2 * unit < total / 4


def within(rank: int, world_size: int) -> None:
    model, opt = make_zoo(Job(stage=3), seed=0)
    model.cells[0].register_forward_hook(lambda *_: next(iter_full_parameters(model)))
    with pytest.raises(ShardAccessError, match="call it between steps"):
        train_zoo(model, opt, range(1), rank, world_size)


def test_it_is_refused_within_a_forward() -> None:
    run_ranks(2, within)


def gathered_meanwhile(rank: int, world_size: int, folder: str) -> None:
    model, opt = make_zoo(Job(stage=3), seed=0)
    with zero_optim.gather_parameters(model):
        for call in (
            lambda: next(iter_full_parameters(model)),
            lambda: checkpoint.save(folder, model, opt),
            lambda: checkpoint.load(folder, model, opt),
            lambda: load_safetensors(model, folder),
        ):
            with pytest.raises(ShardAccessError, match="was called within gather_parameters: leave that before"):
                call()


def test_nothing_is_saved_or_loaded_within_gather_parameters(tmp_path: Path) -> None:
    run_ranks(2, gathered_meanwhile, str(tmp_path))


# -- Hugging Face's layout ---------------------------------------------------------------------------------------------


def save(rank: int, world_size: int, folder: str, job: Job) -> Any:
    model, opt = make_zoo(job, seed=rank)
    train_zoo(model, opt, range(2), rank, world_size)
    checkpoint.save(folder, model, opt, extra={"name": "zoo"})
    return look(model, opt)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("zoo")
    return folder, run_ranks(2, save, str(folder), Job(stage=2, dtype=torch.bfloat16))[0]


def _all_of(folder: Path) -> dict[str, Tensor]:
    place = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for file in sorted(set(place.values())):
        of_file = safetensors.torch.load_file(folder / file)
        assert all(place[name] == file for name in of_file)
        assert not found.keys() & of_file.keys()
        found |= of_file
    assert found.keys() == place.keys()
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp16"])
def test_export_writes_what_transformers_reads(saved: tuple[Path, Any], tmp_path: Path, dtype: str) -> None:
    folder, job = saved
    out = tmp_path / "out"
    assert main(["export", str(folder), str(out), "--dtype", dtype, "--max-shard-size", "2kB"]) == 0
    wanted = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}[dtype]
    files = sorted(file.name for file in out.iterdir())
    assert files[0] == f"model-00001-of-{len(files) - 1:05}.safetensors" and len(files) > 3
    found = _all_of(out)
    assert found.keys() == job.values.keys()
    for name, value in found.items():
        master = job.state.get(name, {}).get("master", job.values[name])
        whole = job.values[name] if dtype == "bf16" else master.to(wanted)
        if name in dict(Zoo().named_buffers()):
            whole = job.values[name]
        assert value.dtype == whole.dtype and torch.equal(value, whole), name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())


def test_one_file_is_read_by_the_package(saved: tuple[Path, Any], tmp_path: Path, capsys: Any) -> None:
    folder, job = saved
    assert main(["export", str(folder / "step-2"), str(tmp_path / "out")]) == 0
    assert "in 1 file(s)" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    model = Zoo().bfloat16()
    safetensors.torch.load_model(model, tmp_path / "out" / "model.safetensors")  # it knows of tied parameters
    assert torch.equal(model.head.weight, job.values["embedding.weight"])
    assert main(["export", str(folder), str(tmp_path / "out")]) == 1
    assert "is there already, and not empty" in capsys.readouterr().err


def test_export_says_what_is_damaged_and_leaves_nothing(saved: tuple[Path, Any], tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(saved[0] / "step-2", tmp_path / "step-2")
    (entry,) = (
        of for of in read_contents(tmp_path / "step-2")["tensors"] if of["name"] == "gain" and of["kind"] == "parameter"
    )
    flip(tmp_path / "step-2" / entry["pieces"][0]["file"], entry["pieces"][0]["offset"])
    assert main(["export", str(tmp_path / "step-2"), str(tmp_path / "out")]) == 1
    assert "of the parameter 'gain', have another checksum" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2"]


def from_meta(rank: int, world_size: int, path: str, stage: int) -> tuple[dict[str, Tensor], list[str], int]:
    """Loads weights; returns them, what was told, and the bytes read of files."""
    with torch.device("meta"):
        model = Zoo()
    if stage == 3:
        model.register_parameter("unused", nn.Parameter(torch.zeros(7)))
        for name in ("gain", "empty", "frozen"):
            held = getattr(model, name)
            setattr(model, name, nn.Parameter(torch.zeros(held.shape), held.requires_grad))
        model.table, model.hidden = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(4)
        shard_module(model, [Cell])
    else:
        model = Zoo()
    read = 0
    with pytest.MonkeyPatch.context() as patch:
        pread = os.pread

        def counted(*arguments: int) -> bytes:
            nonlocal read
            data = pread(*arguments)
            read += len(data)
            return data

        patch.setattr(os, "pread", counted)
        told = load_safetensors(model, path)
    return gathered(model), list(told), read


@pytest.mark.parametrize(("ranks", "stage"), [(1, 2), (2, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("size", ["5GB", "3kB"])
def test_a_rank_reads_its_own_ranges_alone(
    saved: tuple[Path, Any], tmp_path: Path, ranks: int, stage: int, size: str
) -> None:
    folder, job = saved
    assert main(["export", str(folder), str(tmp_path / "out"), "--dtype", "fp32", "--max-shard-size", size]) == 0
    results = run_ranks(ranks, from_meta, str(tmp_path / "out"), stage)
    for weights, told, _ in results:
        assert told == []
        for name in weights.keys() - {"head.weight"}:
            value = job.state.get(name, {}).get("master", job.values[name])
            assert torch.equal(weights[name], value.to(weights[name].dtype)), name
        assert torch.equal(weights["head.weight"], weights["embedding.weight"])
    parameters = 4 * sum(p.numel() for p in Zoo().parameters())
    buffers = sum(job.values[name].nbytes for name, _ in Zoo().named_buffers() if name in job.values)
    read = sum(of_rank[-1] for of_rank in results)
    assert read == (parameters if stage == 3 else parameters * ranks) + buffers * ranks


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(3, 5), "other": torch.ones(2)}, tmp_path / "model.safetensors")
    model = nn.Linear(5, 3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(StateMismatchError, match="missing in .*: 1 tensor, bias; left over in .*: 1 tensor, other"):
        load_safetensors(model, tmp_path)
    assert_bits(before, dict(model.state_dict()))
    told = load_safetensors(model, tmp_path / "model.safetensors", strict=False)
    assert len(told) == 2 and torch.equal(model.weight, torch.ones(3, 5))
    assert not open_files_in(tmp_path)
    with pytest.raises(StateMismatchError, match=r"parameter 'weight' has shape \[3, 4\] of .* here, and \[3, 5\] of"):
        load_safetensors(nn.Linear(4, 3), tmp_path, strict=False)
    safetensors.torch.save_file({"weight": torch.ones(3, 5, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(StateMismatchError, match=r"of torch.float32 here, and \[3, 5\] of torch.int8 there"):
        load_safetensors(model, tmp_path, strict=False)
    for content in (b"", b"no tensors", (2**40).to_bytes(8, "little"), (3).to_bytes(8, "little") + b"[1]"):
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(CheckpointError, match="model.safetensors is no safetensors file"):
            load_safetensors(model, tmp_path)
    with pytest.raises(CheckpointError, match="has no model.safetensors"):
        load_safetensors(model, tmp_path.parent)


def test_an_optimizer_takes_loaded_weights_for_its_masters(tmp_path: Path) -> None:
    safetensors.torch.save_file(
        {"weight": torch.full((3, 5), 2.0), "bias": torch.ones(3)}, tmp_path / "model.safetensors"
    )
    model = nn.Linear(5, 3).bfloat16()
    opt = ShardedAdamW(model.named_parameters(), lr=0.0)
    load_safetensors(model, tmp_path)
    model(torch.ones(1, 5, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    assert torch.equal(model.weight, torch.full((3, 5), 2.0, dtype=torch.bfloat16))


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_inspect_lists_and_verifies(saved: tuple[Path, Any], tmp_path: Path, capsys: Any) -> None:
    folder, _ = saved
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "step-2: step 2, " in out and "world_size: 2" in out and "extra: {'name': 'zoo'}" in out
    line = next(line for line in out.splitlines() if line.startswith("cells.0.up.weight"))
    assert line.split()[1:5] == ["[36,", "12]", "bfloat16", "master"]
    assert line.split()[-3:] == ["2", "6.05", "kB"]
    assert "head.weight is tied to embedding.weight" in out and out.endswith("all checksums are right\n")

    shutil.copytree(folder / "step-2", tmp_path / "step-2")
    for name in ("rank-0.safetensors", "rank-1.safetensors"):
        flip(tmp_path / "step-2" / name, -1)
    assert main(["inspect", str(tmp_path), "--quick"]) == 0
    assert capsys.readouterr().out.endswith("lengths are right\n")
    assert main(["inspect", str(tmp_path)]) == 1
    err = capsys.readouterr().err
    assert err.count("zero-optim inspect: ") == 2 and err.count("have another checksum") == 2
    assert not open_files_in(tmp_path)
    assert main(["inspect", str(tmp_path / "nothing")]) == 1
    assert "holds no checkpoint" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["inspect", str(tmp_path / "file")]) == 1
    assert "file is no folder: give that of a checkpoint" in capsys.readouterr().err
