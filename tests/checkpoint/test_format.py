"""A checkpoint's files are as docs/checkpoint.md says; ``keep_last`` removes checkpoints and nothing else."""

from __future__ import annotations

import json
import math
from pathlib import Path

import google_crc32c
import pytest
import torch
import zero_optim
from compare import same
from harness import run_ranks
from safetensors import safe_open
from small_jobs import INDEX, MIB, network
from torch import Tensor, nn
from zero_optim import checkpoint


def _save_large(rank: int, world_size: int, folder: str, stage: int) -> dict[str, dict[str, Tensor]]:
    """A checkpoint with a parameter of more than 1 MiB, as whole tensors by kind and name."""
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


# -- the folder ------------------------------------------------------------------------------------------------------


def _steps(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_keep_last_removes_older_ones_and_nothing_else(tmp_path):
    model, own = network(0), ["Step-1", "notes", "step-1.bak", "step-best", ".writing-letters", "step-003", "step-3"]
    for step in (1, 2, 10):
        checkpoint.save(tmp_path, model, step=step)
    (tmp_path / "step-10" / INDEX).unlink()
    for name in own:
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    (tmp_path / ".writing-step-5").mkdir()
    checkpoint.save(tmp_path, model, step=11, keep_last=2)
    assert _steps(tmp_path) == sorted([*own, "step-2", "step-10", "step-11"])
    assert checkpoint.save(tmp_path, model, step=6, keep_last=1).exists()
    assert {*own, "step-6", "step-11"} <= set(_steps(tmp_path)) and "step-2" not in _steps(tmp_path)
    latest = checkpoint.latest(tmp_path)
    assert latest is not None and latest.name == "step-6"  # it was saved last
