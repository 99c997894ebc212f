"""What is loaded into an optimizer that has not stepped is read once. Where a load fails, its state is made anew."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import assert_bits, flip
from checkpoint_files import read_contents
from harness import run_ranks
from sharded_cases import full_state, gathered
from torch import nn
from zero_optim import ShardedAdamW, checkpoint, shard_module
from zero_optim.checkpoint.rank_file import ChecksumBlock, Files
from zero_optim.errors import CheckpointError


def job(stage: int, seed: int, offload: str | None = None) -> tuple[nn.Module, ShardedAdamW]:
    """Two layers in bf16, whose buckets are small: there are several."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48)).bfloat16()
    if stage == 3:
        shard_module(model, (nn.Linear,))
    opt = ShardedAdamW(model.named_parameters(), stage=stage, bucket_cap_mb=0.005, state_offload=offload)
    return model, opt


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(2, 48, dtype=torch.bfloat16)).square().sum().backward()
        opt.step()


def fail_to_load(rank: int, world_size: int, folder: str, stage: int, offload: str | None) -> str:
    """Load what is damaged where one rank alone reads it. Then train, beside a job that has never loaded."""
    model, opt = job(stage, 0, offload)
    train(model, opt, 2)
    checkpoint.save(folder, model, opt, step=2)
    opt.close()
    if rank == 0:
        damage_last_state(Path(folder) / "step-2")
    model, opt = job(stage, 1, offload)
    with pytest.raises(CheckpointError) as raised:
        checkpoint.load(folder, model, opt)
    other, undisturbed = job(stage, 1, offload)
    assert_bits(gathered(other), gathered(model))
    assert full_state(opt) == {}  # of those that never stepped there is none
    train(model, opt, 2)
    train(other, undisturbed, 2)
    assert_bits(gathered(other), gathered(model))
    expected, found = full_state(undisturbed), full_state(opt)
    for index in expected:
        assert_bits(expected[index], found[index])
    return str(raised.value)


def damage_last_state(folder: Path) -> None:
    """Change a bit of the state that is filled last: until it is read, much has been filled."""
    pieces = [
        (piece["file"], piece["offset"])
        for tensor in read_contents(folder)["tensors"]
        if tensor["kind"] == "exp_avg_sq"
        for piece in tensor["pieces"]
    ]
    file, offset = max(pieces)
    flip(folder / file, offset)


@pytest.mark.parametrize(
    ("stage", "offload"), [(0, None), (1, None), (2, None), (3, None), (2, "cpu"), (3, "paged"), (2, "nvme:")]
)
def test_after_a_load_that_failed_a_new_optimizer_is_new(tmp_path: Path, stage: int, offload: str | None) -> None:
    if offload == "nvme:":
        offload = f"nvme:{tmp_path}"
    for message in run_ranks(2, fail_to_load, str(tmp_path / "checkpoints"), stage, offload):
        assert "the exp_avg_sq of " in message and "have another checksum" in message


def read_by_kind(patch: pytest.MonkeyPatch, folder: Path, model: nn.Module, opt: Any) -> Counter[str]:
    """Bytes that a load reads, by kind of tensor."""
    found: Counter[str] = Counter()
    read_block = Files.read_block

    def counted(files: Files, block: ChecksumBlock) -> bytes:
        found[block.spec.kind] += block.nbytes
        return read_block(files, block)

    with patch.context() as within:
        within.setattr(Files, "read_block", counted)
        checkpoint.load(folder, model, opt)
    return found


def test_state_is_read_once_where_it_can_be_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = job(2, 0)
    train(model, opt, 1)
    checkpoint.save(tmp_path, model, opt, step=1)
    numel = sum(parameter.numel() for parameter in model.parameters())
    once = {"parameter": 2 * numel, "master": 4 * numel, "exp_avg": 4 * numel, "exp_avg_sq": 4 * numel}
    assert read_by_kind(monkeypatch, tmp_path, model, opt) == {kind: 2 * nbytes for kind, nbytes in once.items()}
    assert read_by_kind(monkeypatch, tmp_path, *job(2, 1)) == {**once, "parameter": 4 * numel}


def test_torch_s_optimizer_keeps_its_state_until_all_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(48, 64).bfloat16()
    opt = torch.optim.AdamW(model.parameters())
    train(model, opt, 1)
    checkpoint.save(tmp_path, model, opt, step=1)
    train(model, opt, 1)
    numel = sum(parameter.numel() for parameter in model.parameters())
    shutil.copytree(tmp_path / "step-1", tmp_path / "damaged")
    damage_last_state(tmp_path / "damaged")
    before = [{kind: value.clone() for kind, value in entry.items()} for entry in opt.state.values()]
    with pytest.raises(CheckpointError, match="another checksum"):
        checkpoint.load(tmp_path / "damaged", model, opt)
    for expected, entry in zip(before, opt.state.values(), strict=True):
        assert_bits(expected, entry)
    found = read_by_kind(monkeypatch, tmp_path / "step-1", model, opt)
    assert found == {"parameter": 4 * numel, "exp_avg": 2 * numel, "exp_avg_sq": 2 * numel}
