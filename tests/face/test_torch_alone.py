"""The optimizer needs torch and nothing else: not NumPy either, which torch does not bring."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_ranks import run_script

SCRIPT = """
import sys

for name in ("numpy", "tqdm", "matplotlib", "google_crc32c", "safetensors", "triton"):
    sys.modules[name] = None  # importing it raises ImportError

import torch
import torch.distributed as dist
import zero_optim
from torch import nn

assert not dist.is_initialized(), "importing starts no process group"
rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
try:
    torch.zeros(1).numpy()
    raise SystemExit("NumPy is there after all")
except RuntimeError:
    pass
for alone, stage in [(True, 0), (True, 1), (True, 2), (True, 3), (False, 0), (False, 1), (False, 2), (False, 3)]:
    if not alone and not dist.is_initialized():
        dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world_size)
    torch.manual_seed(0 if alone else rank)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    if stage == 3:
        zero_optim.shard_module(model, units=(nn.Linear,))
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=0.1, stage=stage)
    for _ in range(3):
        model(torch.ones(2, 8)).square().sum().backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    zero_optim.full_state_dict(opt)
    opt.load_state_dict(opt.state_dict())
    with zero_optim.gather_parameters(model):
        print(stage, model[0].weight.double().sum().item())
    opt.close()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_every_stage_trains_with_torch_alone(tmp_path: Path) -> None:
    """On one rank, and then on two."""
    ranks = run_script(SCRIPT, 2, tmp_path)
    for code, output, errors in ranks:
        assert code == 0, errors
        assert output == ranks[0].output and len(output.splitlines()) == 8
