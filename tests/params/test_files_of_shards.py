"""What writes a sharded model into a file and does not know of shards is refused: a file would have one rank's part."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import zero_optim
from harness import run_ranks
from sharded_cases import Block, Net
from torch import Tensor, nn
from zero_optim import FlatShard, ShardAccessError

Save = Callable[[nn.Module, Path], object]

WAYS: dict[str, Save] = {
    "torch.save of the state dict": lambda model, file: torch.save(model.state_dict(), file),
    "torch.save in the old format": lambda model, file: torch.save(
        model.state_dict(), file, _use_new_zipfile_serialization=False
    ),
    "torch.save among other things": lambda model, file: torch.save({"step": 3, "model": model.state_dict()}, file),
    "torch.save of a copy": lambda model, file: torch.save(copy.deepcopy(model.state_dict()), file),
    "torch.save of tensors moved": lambda model, file: torch.save([v.cpu() for v in model.state_dict().values()], file),
    "torch.save of tensors cast": lambda model, file: torch.save([v.half() for v in model.state_dict().values()], file),
    "torch.save of detached ones": lambda model, file: torch.save([p.detach() for p in model.parameters()], file),
    "torch.save of the parameters": lambda model, file: torch.save(list(model.parameters()), file),
    "torch.save of the model": lambda model, file: torch.save(model, file),
    "torch.save of a part": lambda model, file: torch.save(model.blocks[1].up, file),
    "pickle": lambda model, file: file.write_bytes(pickle.dumps(model.state_dict())),
    "safetensors.save_file": lambda model, file: safetensors.torch.save_file(model.state_dict(), file),
    "safetensors.save_model": lambda model, file: safetensors.torch.save_model(model, str(file)),
    "safetensors.save": lambda model, file: file.write_bytes(safetensors.torch.save(model.state_dict())),
}


def refusals(rank: int, world_size: int, folder: str) -> list[str]:
    """What was not refused, or without naming parameter and remedy, or has left a file that loads."""
    torch.manual_seed(0)
    model = Net()
    zero_optim.shard_module(model, (Block,))
    wrong = []
    for number, (name, save) in enumerate(WAYS.items()):
        file = Path(folder, f"{number}-{rank}")
        try:
            save(model, file)
            wrong.append(f"{name} passed")
        except ShardAccessError as error:
            if not ("the parameter '" in str(error) and "zero_optim." in str(error)):
                wrong.append(f"{name}: {error}")
        if file.exists() and loads(file):  # torch.save has opened it before it looks at the first tensor
            wrong.append(f"{name} left a file of {file.stat().st_size} bytes that loads")
    return wrong


def loads(file: Path) -> bool:
    try:
        torch.load(file, weights_only=False)
    except (RuntimeError, EOFError, pickle.UnpicklingError):
        return False
    return True


def test_no_way_of_saving_takes_shards(tmp_path: Path) -> None:
    for wrong in run_ranks(2, refusals, str(tmp_path)):
        assert not wrong, "\n".join(wrong)


def state_in_files(rank: int, world_size: int) -> None:
    """An optimizer's ``state_dict()`` may be saved, a file a rank. It says what it is, and is no model's."""
    torch.manual_seed(0)
    model, ordinary = Net(), Net()
    zero_optim.shard_module(model, (Block,))
    opt = zero_optim.ShardedAdamW(model.named_parameters())
    model(torch.arange(8).view(2, 4)).square().mean().backward()
    opt.step()
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    state: dict[str, dict[str, Any]] = torch.load(file, weights_only=True)["state"]
    moments: dict[str, Tensor] = {name: tensors["exp_avg"] for name, tensors in state.items()}
    assert all(type(moment) is FlatShard for moment in moments.values())
    assert "exp_avg of 'norm.weight'" in repr(moments["norm.weight"]) and "of 20" in repr(moments["norm.weight"])
    before = copy.deepcopy(ordinary.state_dict())
    with pytest.raises(RuntimeError, match=r"exp_avg of '.*'.*this rank holds"):
        ordinary.load_state_dict({**moments, "head.weight": moments["embedding.weight"]})
    assert all(torch.equal(value, before[name]) for name, value in ordinary.state_dict().items())
    opt.close()


def test_a_file_of_one_ranks_state_loads_into_no_model() -> None:
    run_ranks(2, state_in_files)
