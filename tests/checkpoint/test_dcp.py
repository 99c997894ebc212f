"""``torch.distributed.checkpoint`` takes sharded models and optimizers, and takes them to other engines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cells import slow_after
from harness import run_ranks
from sharded_cases import Block, Net, Run, full_state, gathered, make, train_step
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from zero_optim.errors import ShardAccessError, ZeroOptimError
from zero_optim.params.flat_shard import rectangles

STEPS = 3
Snapshot = tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]


@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 3, 2)])
def test_rectangles_are_the_flat_range(shape: tuple[int, ...]) -> None:
    numel = math.prod(shape)
    whole = torch.arange(numel).reshape(shape)
    for start in range(numel + 1):
        for end in range(start, numel + 1):
            parts = list(rectangles(shape, start, end - start))
            assert len(parts) <= max(2 * len(shape) - 1, 1)
            taken = []
            for part in parts:
                assert part.first == len(taken)
                place = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
                taken += whole[place].reshape(-1).tolist()
            assert taken == list(range(start, end))


def test_a_tensor_without_elements_is_one_rectangle() -> None:
    assert [(part.offsets, part.sizes) for part in rectangles((3, 0), 0, 0)] == [((0, 0), (3, 0))]


def snapshot(model: nn.Module, opt: Any) -> Snapshot:
    return gathered(model), full_state(opt)


def assert_same(ours: Snapshot, theirs: Snapshot) -> None:
    """``theirs`` may have masters beside what ours has."""
    for here, there in ((ours[0], theirs[0]), *((ours[1][key], theirs[1][key]) for key in ours[1])):
        assert here.keys() <= there.keys()
        assert all(torch.equal(here[name], there[name].to(here[name].dtype)) for name in here)
    assert ours[1].keys() == theirs[1].keys() and len(ours[1]) > 10


def trained(rank: int, run: Run) -> tuple[nn.Module, Any]:
    torch.manual_seed(rank)
    model, opt = make(run, Net())
    for step in range(STEPS):
        train_step(run, rank, model, opt, step)
    return model, opt


def save(rank: int, world_size: int, folder: str, run: Run, how: str) -> Snapshot:
    model, opt = trained(rank, run)
    if how == "async_save":
        # DCP's thread agrees with those of other ranks over it, while this one does other things.
        group = torch.distributed.new_group()
        saving = dcp.async_save({"model": model, "optim": opt}, checkpoint_id=folder, process_group=group)
        before = snapshot(model, opt)
        train_step(run, rank, model, opt, STEPS)  # what is saved is what was
        saving.result()
        return before
    content: dict[str, Any] = {"model": model, "optim": opt}
    if how == "get_state_dict":
        content = dict(zip(("model", "optim"), get_state_dict(model, opt), strict=True))
    dcp.save(content, checkpoint_id=folder)
    return snapshot(model, opt)


def load(rank: int, world_size: int, folder: str, run: Run, how: str) -> Snapshot:
    torch.manual_seed(100 + rank)
    model, opt = make(run, Net())
    if how == "get_state_dict":
        of_model, of_optimizer = get_state_dict(model, opt)
        assert all(int(entry["step"]) == 0 for entry in of_optimizer["state"].values())  # it has made no step
        dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=of_model, optim_state_dict=of_optimizer)
    else:
        dcp.load({"model": model, "optim": opt}, checkpoint_id=folder)
    loaded = snapshot(model, opt)
    train_step(run, rank, model, opt, STEPS)
    return loaded


@pytest.mark.parametrize(
    ("how", "ranks", "stage", "ranks_then", "stage_then", "dtype"),
    slow_after(
        4,
        [
            ("save", 3, 3, 2, 0, torch.float16),
            ("async_save", 2, 2, 4, 3, torch.bfloat16),
            ("get_state_dict", 1, 0, 3, 2, torch.float32),
            ("get_state_dict", 4, 1, 1, 3, torch.bfloat16),
            ("save", 2, 2, 2, 2, torch.bfloat16),
            ("get_state_dict", 4, 3, 2, 3, torch.float32),
            ("async_save", 4, 1, 1, 3, torch.bfloat16),
            ("async_save", 3, 3, 2, 0, torch.float16),
            ("save", 1, 0, 3, 2, torch.float32),
        ],
    ),
)
def test_it_is_saved_and_loaded_at_another_scale(
    tmp_path: Path, how: str, ranks: int, stage: int, ranks_then: int, stage_then: int, dtype: torch.dtype
) -> None:
    folder = str(tmp_path / "checkpoint")
    saved = run_ranks(ranks, save, folder, Run(stage=stage, dtype=dtype), how)
    small = {"bucket_cap_mb": 0.001} if stage_then < 3 else {}
    loaded = run_ranks(ranks_then, load, folder, Run(stage=stage_then, dtype=dtype, options=small), how)
    for of_rank in loaded:
        assert_same(saved[0], of_rank)


# -- other engines -----------------------------------------------------------------------------------------------------


def _fsdp2(world_size: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of FSDP2 with torch's AdamW; on one rank a plain one."""
    model = Net()
    if world_size > 1:
        mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
        for module in (*(module for module in model.modules() if isinstance(module, Block)), model):
            fully_shard(module, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _torch_snapshot(model: nn.Module, opt: torch.optim.Optimizer) -> Snapshot:
    weights = {name: _whole(value).detach().clone() for name, value in model.state_dict().items()}
    state = get_optimizer_state_dict(model, opt)["state"]
    return weights, {
        name: {key: _whole(value).clone() for key, value in entry.items()} for name, entry in state.items()
    }


def theirs(rank: int, world_size: int, folder: str, saves: bool) -> Snapshot:
    """AdamW, alone or on FSDP2, that saves or loads."""
    torch.manual_seed(7 if saves else 8)
    model, opt = _fsdp2(world_size)
    for step in range(STEPS if saves else 0):
        model(torch.arange(9)[None] + rank + step).square().mean().backward()
        opt.step()
        opt.zero_grad()
    of_model, of_optimizer = get_state_dict(model, opt)
    if saves:
        dcp.save({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder)
    else:
        dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder)
        set_state_dict(model, opt, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return _torch_snapshot(model, opt)


def ours(rank: int, world_size: int, folder: str, stage: int, saves: bool) -> Snapshot:
    how = "get_state_dict"
    run = Run(stage=stage)
    model_and_state = (save if saves else load)(rank, world_size, folder, run, how)
    names = [name for name, _ in Net().named_parameters()]
    return model_and_state[0], {names[index]: entry for index, entry in model_and_state[1].items()}


def _kinds(state: dict[str, dict[str, Tensor]], kinds: Sequence[str]) -> dict[str, dict[str, Tensor]]:
    return {name: {kind: entry[kind] for kind in kinds} for name, entry in state.items()}


@pytest.mark.parametrize(
    ("ranks", "ranks_then", "stage"),
    slow_after(2, [(2, 4, 3), (2, 1, 2), (4, 2, 2), (2, 1, 3), (1, 2, 3), (1, 2, 2)]),
)
def test_it_goes_over_to_fsdp2_and_to_torch_and_comes_back(
    tmp_path: Path, ranks: int, ranks_then: int, stage: int
) -> None:
    """On one rank it is a plain model with ``torch.optim.AdamW``."""
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    kinds = ("step", "exp_avg", "exp_avg_sq")
    weights, state = run_ranks(ranks, ours, there, stage, True)[0]
    for of_rank in run_ranks(ranks_then, theirs, there, False):
        assert_same((weights, _kinds(state, kinds)), (of_rank[0], _kinds(of_rank[1], kinds)))
    weights, state = run_ranks(ranks_then, theirs, back, True)[0]
    for of_rank in run_ranks(ranks, ours, back, stage, False):
        assert_same((weights, _kinds(state, kinds)), (of_rank[0], _kinds(of_rank[1], kinds)))


def load_in_16_bits(rank: int, world_size: int, folder: str) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """A bf16 model takes over a checkpoint of fp32, which has no masters; after the step they are there."""
    torch.manual_seed(100 + rank)
    model, opt = make(Run(stage=2, dtype=torch.bfloat16, lr=0.0, options={"weight_decay": 0.0}), Net())
    of_model, of_optimizer = get_state_dict(model, opt)
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load({"model": of_model, "optim": of_optimizer}, checkpoint_id=folder, planner=planner)
    for group in of_optimizer["param_groups"]:
        group["lr"] = 0.0
    set_state_dict(model, opt, model_state_dict=of_model, optim_state_dict=of_optimizer)
    train_step(Run(stage=2, dtype=torch.bfloat16), rank, model, opt, STEPS)
    names = [name for name, _ in Net().named_parameters()]
    return gathered(model), {names[index]: entry for index, entry in full_state(opt).items()}


def test_masters_that_others_do_not_have_come_from_the_parameters(tmp_path: Path) -> None:
    weights, _ = run_ranks(2, theirs, str(tmp_path / "theirs"), True)[0]
    for values, state in run_ranks(2, load_in_16_bits, str(tmp_path / "theirs")):
        for name, entry in state.items():
            assert torch.equal(values[name], weights[name].bfloat16())
            assert torch.equal(entry["master"].bfloat16(), values[name]), name


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def flattened(rank: int, world_size: int, folder: str, stage: int, saves: bool) -> Snapshot:
    """Two groups of parameters with names, their state as one flat dict, as torchtitan keeps it."""
    run = Run(stage=stage, dtype=torch.bfloat16, lr=1e-3)
    torch.manual_seed(rank if saves else 100 + rank)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        named = list(model.named_parameters())
        return [{"params": named[:5], "lr": 0.02 if saves else 0.5}, {"params": named[5:]}]

    model, opt = make(run, Net(), params=groups)
    names = [group["param_names"] for group in opt.param_groups]
    for step in range(STEPS if saves else 0):
        train_step(run, rank, model, opt, step)
    content = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt, options=FLAT)}
    assert all("." in key and not isinstance(value, dict) for key, value in content["optim"].items())
    if saves:
        dcp.save(content, checkpoint_id=folder)
    else:
        dcp.load(content, checkpoint_id=folder)
        model.load_state_dict(content["model"])
        set_optimizer_state_dict(model, opt, optim_state_dict=content["optim"], options=FLAT)
    assert [group["lr"] for group in opt.param_groups] == [0.02, 1e-3]
    assert [group["param_names"] for group in opt.param_groups] == names
    return snapshot(model, opt)


@pytest.mark.parametrize(("ranks", "stage", "ranks_then", "stage_then"), [(1, 2, 1, 2), (2, 2, 3, 3)])
def test_flattened_state_of_named_parameters(
    tmp_path: Path, ranks: int, stage: int, ranks_then: int, stage_then: int
) -> None:
    saved = run_ranks(ranks, flattened, str(tmp_path / "flat"), stage, True)
    for of_rank in run_ranks(ranks_then, flattened, str(tmp_path / "flat"), stage_then, False):
        assert_same(saved[0], of_rank)


# -- what is refused ---------------------------------------------------------------------------------------------------


def save_to_hugging_face(rank: int, world_size: int, folder: str, stage: int) -> str:
    model, opt = trained(rank, Run(stage=stage))
    content = {"model": model} if stage == 3 else {"optim": opt}
    writer = HuggingFaceStorageWriter(folder, save_distributed=True)
    with pytest.raises(dcp.api.CheckpointException) as raised:
        dcp.save(content, storage_writer=writer)
    failure = raised.value.failures[rank][0]
    assert isinstance(failure, ShardAccessError)
    return str(failure)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_storage_that_would_lose_pieces_is_refused(tmp_path: Path, stage: int) -> None:
    for message in run_ranks(2, save_to_hugging_face, str(tmp_path / "checkpoint"), stage):
        assert "HuggingFaceStorageWriter keeps one piece of a tensor" in message
        assert "zero_optim.checkpoint.save" in message
    assert not list(tmp_path.rglob("*.safetensors"))


# -- whole tensors, by StateDictOptions(full_state_dict=True) ----------------------------------------------------------


def _plain(state: Any) -> bool:
    """Whether all tensors in there are plain ones."""
    if isinstance(state, dict | list | tuple):
        return all(map(_plain, state.values() if isinstance(state, dict) else state))
    return not isinstance(state, Tensor) or type(state) in (Tensor, nn.Parameter)


def whole(
    rank: int, world_size: int, run: Run, then: Run, options: dict[str, bool], loaded: dict[str, bool]
) -> tuple[Snapshot, Snapshot]:
    """What is there before it is given out by ``options``, and after a load by ``loaded`` into other weights."""
    model, opt = trained(rank, run)
    before = snapshot(model, opt)
    of_model, of_optimizer = get_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, **options))
    if options.get("cpu_offload") and rank:
        assert not of_model and not of_optimizer.get("state") and "state.embedding.weight.step" not in of_optimizer
    else:
        assert _plain(of_model) and _plain(of_optimizer)
        assert all(torch.equal(of_model[name], value) for name, value in before[0].items() if name in of_model)
    opt.close()
    torch.manual_seed(100 + rank)
    model, opt = make(then, Net())
    if options.get("cpu_offload") and not loaded.get("broadcast_from_rank0"):
        content = [(of_model, of_optimizer)]
        torch.distributed.broadcast_object_list(content)
        of_model, of_optimizer = content[0]
    given = StateDictOptions(full_state_dict=True, **loaded)
    set_model_state_dict(model, of_model, options=given)
    if given.flatten_optimizer_state_dict:
        with pytest.raises(ZeroOptimError, match="leave one of the two out"):
            set_optimizer_state_dict(model, opt, of_optimizer, options=given)
        return before, before
    set_optimizer_state_dict(model, opt, of_optimizer, options=given)
    after = snapshot(model, opt)
    train_step(then, rank, model, opt, STEPS)
    return before, after


SMALL = {"master": "split", "state_dtype": "int8"}


@pytest.mark.parametrize(
    ("ranks", "run", "then", "options", "loaded"),
    [
        (2, Run(2), Run(2), {"cpu_offload": True}, {"broadcast_from_rank0": True}),
        (2, Run(3), Run(3), {"cpu_offload": True}, {"broadcast_from_rank0": True}),
        (3, Run(3, torch.bfloat16), Run(1, torch.bfloat16), {"cpu_offload": True}, {"broadcast_from_rank0": True}),
        (2, Run(0), Run(3), {}, {}),
        (2, Run(3), Run(0), {}, {"cpu_offload": True}),
        (2, Run(2, torch.bfloat16), Run(2, torch.bfloat16), {"flatten_optimizer_state_dict": True}, {}),
        (2, Run(1, torch.bfloat16, options=SMALL), Run(2, torch.bfloat16), {"cpu_offload": True}, {}),
        (2, Run(2, torch.bfloat16), Run(2, torch.bfloat16, options=SMALL), {}, {"broadcast_from_rank0": True}),
        (1, Run(2), Run(2), {"cpu_offload": True}, {}),
    ],
)
def test_whole_state_dicts(ranks: int, run: Run, then: Run, options: dict, loaded: dict) -> None:
    if "flatten_optimizer_state_dict" in options:
        loaded = {**loaded, **options}
    for before, after in run_ranks(ranks, whole, run, then, options, loaded):
        if then.options or run.options:  # what is kept in fewer bits is rounded
            for name, value in before[0].items():
                torch.testing.assert_close(after[0][name], value, rtol=1e-2, atol=1e-2)
            assert all(after[1][name]["step"] == entry["step"] for name, entry in before[1].items())
        else:
            assert_same(before, after)


def partial_whole(rank: int, world_size: int, run: Run, broadcast: bool) -> dict[str, float]:
    """A whole state of one parameter alone, as torch's AdamW has it where the others never had a gradient."""
    model, opt = trained(rank, run)
    options = StateDictOptions(full_state_dict=True)
    content = get_optimizer_state_dict(model, opt, options=options)
    kept = next(iter(content["state"]))
    content["state"] = {kept: content["state"][kept]}
    expected = content["state"][kept]["exp_avg"].clone()
    given = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=broadcast, cpu_offload=broadcast)
    set_optimizer_state_dict(model, opt, content if not (broadcast and rank) else {}, options=given)
    after = get_optimizer_state_dict(model, opt, options=options)["state"]
    assert torch.equal(after[kept]["exp_avg"], expected)
    return {name: entry["step"].item() for name, entry in after.items() if name != kept}


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("broadcast", [False, True])
def test_a_whole_state_dict_of_some_parameters(stage: int, broadcast: bool) -> None:
    for steps in run_ranks(2, partial_whole, Run(stage), broadcast):
        assert steps and not any(steps.values())  # they begin anew
