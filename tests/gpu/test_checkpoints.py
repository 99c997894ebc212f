"""Checkpoints of a GPU: the state as it was, whatever training does meanwhile; back on the GPU and on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from places import DEVICE
from torch import Tensor, nn
from zero_optim import ShardedAdamW, checkpoint, load_safetensors
from zero_optim.checkpoint.hugging_face import export

pytestmark = pytest.mark.gpu
pytest.importorskip("google_crc32c", reason="left out: google-crc32c is not here, and --wheel gave none")

WIDTH = 1500  # a layer of 9 MB in fp32: more than one block, and less than what is staged at a time; no whole rows


def job(device: str, seed: int = 0) -> tuple[nn.Module, ShardedAdamW]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)).to(torch.bfloat16).to(device)
    return model, ShardedAdamW(model.named_parameters(), lr=1e-2)


def train(model: nn.Module, opt: ShardedAdamW, steps: int) -> None:
    for step in range(steps):
        x = torch.full((4, WIDTH), 0.1 * (step + 1), dtype=torch.bfloat16, device=opt.device)
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def snapshot(model: nn.Module, opt: ShardedAdamW) -> dict[str, Tensor]:
    """Clones, on the CPU."""
    weights = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    state = opt.state_dict()["state"]
    kinds = ("master", "exp_avg", "exp_avg_sq", "step")
    return weights | {f"{name}.{kind}": state[name][kind].cpu().clone() for name in state for kind in kinds}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_is_what_was(tmp_path: Path, background: bool) -> None:
    model, opt = job(DEVICE)
    train(model, opt, 3)
    before = snapshot(model, opt)
    for step in (1, 2):  # the second finds the memory of the first
        checkpoint.save(tmp_path, model, opt, step=step, background=background)
    train(model, opt, 20)
    checkpoint.wait()
    opt.close()
    for device in (DEVICE, "cpu"):
        other, its_opt = job(device, seed=1)
        assert checkpoint.load(tmp_path, other, its_opt).step == 2
        assert_same(snapshot(other, its_opt), before)
        its_opt.close()


def test_random_states_come_back(tmp_path: Path) -> None:
    model, opt = job(DEVICE)
    checkpoint.save(tmp_path, model, opt)
    drawn = torch.rand(5, device=DEVICE)
    checkpoint.load(tmp_path, model, opt)
    assert torch.equal(torch.rand(5, device=DEVICE), drawn)


def test_weights_go_out_and_come_in(tmp_path: Path) -> None:
    model, opt = job(DEVICE)
    train(model, opt, 2)
    checkpoint.save(tmp_path / "saved", model, opt)
    export(tmp_path / "saved", tmp_path / "out")
    other, _ = job(DEVICE, seed=1)
    load_safetensors(other, tmp_path / "out")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
