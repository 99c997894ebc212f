"""What is refused on a shard names what fits the tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from zero_optim import FlatShard, ShardAccessError
from zero_optim.params.param_shard import ParamShard, StateDictShard

CLIP, SCALER, LOCAL = "opt.clip_grad_norm_", "zero_optim.GradScaler", "`.local`"
GATHER, WRITEBACK = "gather_parameters", "writeback=True"
STATE, LOAD_STATE = "zero_optim.full_state_dict", "zero_optim.load_full_state_dict"
WEIGHTS, SAVE = "zero_optim.full_model_state_dict", "zero_optim.checkpoint.save"
WORDS = {CLIP, SCALER, LOCAL, GATHER, WRITEBACK, STATE, LOAD_STATE, WEIGHTS, SAVE}

FITTING = {
    "gradient": {CLIP, SCALER, LOCAL},
    "parameter": {GATHER, WRITEBACK, WEIGHTS, SAVE},
    "exp_avg": {STATE, LOAD_STATE, LOCAL, SAVE},
}

Try = Callable[[Any, Path], object]


def _with_grad(shard: Tensor) -> list[nn.Parameter]:
    """A parameter with such a gradient."""
    parameter = nn.Parameter(torch.zeros(shard.shape))
    parameter.grad = shard
    return [parameter]


def _unscale(shard: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(torch.optim.SGD(_with_grad(shard), lr=0.1))


def _hugging_face(shard: Tensor, folder: Path) -> None:
    dcp.save({"x": shard}, storage_writer=dcp.HuggingFaceStorageWriter(str(folder)), no_dist=True)


USES: dict[str, Try] = {
    "norm": lambda x, _: x.norm(),
    "torch.linalg.norm": lambda x, _: torch.linalg.norm(x),
    "_foreach_norm": lambda x, _: torch._foreach_norm([torch.ones(2, 4), x]),
    "get_total_norm": lambda x, _: nn.utils.get_total_norm([x]),
    "add": lambda x, _: x + 1,
    "sum": lambda x, _: x.sum(),
    "abs": lambda x, _: x.abs().max(),
    "matmul": lambda x, _: torch.ones(3, 2) @ x,
    "isnan": lambda x, _: x.isnan().any(),
    "item": lambda x, _: x.item(),
    "tolist": lambda x, _: x.tolist(),
    "numpy": lambda x, _: x.numpy(force=True),
    "np.asarray": lambda x, _: np.asarray(x.detach()),
    "dlpack": lambda x, _: torch.from_dlpack(x.detach()),
    "stack": lambda x, _: torch.stack([torch.ones(2, 4), x]),
    "into another": lambda x, _: torch.ones(2, 4).add_(x),
    "copied into another": lambda x, _: torch.ones(2, 4).copy_(x),
    "==": lambda x, _: x == x,
    "in": lambda x, _: 1.0 in x,
    "torch.equal": lambda x, _: torch.equal(x, x),
    "F.embedding": lambda x, _: F.embedding(torch.tensor([0]), x),
    "fill_(x)": lambda x, _: torch.ones(2).fill_(x),
    "mul_": lambda x, _: x.mul_(2),
    "/=": lambda x, _: x.__itruediv__(2),
    "_foreach_div_": lambda x, _: torch._foreach_div_([torch.ones(2, 4), x], 2.0),
    "out=": lambda x, _: torch.add(torch.ones(2, 4), 1, out=x),
    "clamp_": lambda x, _: x.clamp_(-1, 1),
    "fill_": lambda x, _: x.fill_(1),
    "nan_to_num_": lambda x, _: x.nan_to_num_(),
    "view": lambda x, _: x.view(-1),
    "reshape": lambda x, _: x.reshape(4, 2),
    "flatten": lambda x, _: x.flatten(),
    "x[0]": lambda x, _: x[0],
    "x[:, 1:]": lambda x, _: x[:, 1:],
    "x[[0]]": lambda x, _: x[[0]],
    "T": lambda x, _: x.T,
    "split": lambda x, _: x.split(1),
    "list": lambda x, _: list(x),
    "clone": lambda x, _: x.clone(),
    "share_memory_": lambda x, _: x.detach().share_memory_(),
    "untyped_storage": lambda x, _: x.untyped_storage(),
    "pin_memory": lambda x, _: x.pin_memory(),
    "safetensors": lambda x, folder: safetensors.torch.save_file({"x": x}, folder / "x.safetensors"),
}

OF_GRADIENTS: dict[str, Try] = {
    "clip_grad_norm_": lambda x, _: nn.utils.clip_grad_norm_(_with_grad(x), 1.0),
    "clip_grad_value_": lambda x, _: nn.utils.clip_grad_value_(_with_grad(x), 1.0),
    "GradScaler": lambda x, _: _unscale(x),
    "copy_": lambda x, _: x.copy_(torch.ones(2, 4)),
}


def shards(kind: str) -> list[FlatShard]:
    """[2, 4], of which elements 2 to 5 are here."""
    local = torch.arange(3.0)
    if kind == "parameter":
        parameter = ParamShard(local, 2, nn.Parameter(torch.zeros(2, 4)), "fc.weight")
        return [parameter, StateDictShard(local, 2, (2, 4), parameter.label)]
    return [FlatShard(local, 2, (2, 4), f"{kind} of 'fc.weight'")]


def named(message: str) -> set[str]:
    """The remedies in it."""
    return {word for word in WORDS if word in message}


CASES = [
    pytest.param(kind, attempt, id=f"{kind}-{name}")
    for kind in FITTING
    for name, attempt in {**USES, **(OF_GRADIENTS if kind == "gradient" else {})}.items()
]


@pytest.mark.parametrize(("kind", "attempt"), CASES)
@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode])
def test_what_is_refused_names_what_fits(kind: str, attempt: Try, grad: Callable[[], Any], tmp_path: Path) -> None:
    for shard in shards(kind):
        before = shard.local.clone()
        with grad(), pytest.raises(ShardAccessError) as raised:
            attempt(shard, tmp_path)
        assert named(str(raised.value)) == FITTING[kind], raised.value
        assert f"on the {shard.label}: it is sharded, this rank holds 3 of its 8 elements" in str(raised.value)
        assert torch.equal(shard.local, before)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", FITTING)
def test_a_storage_of_hugging_face_is_told_where_shards_can_go(kind: str, tmp_path: Path) -> None:
    for shard in shards(kind):
        with pytest.warns(UserWarning, match="single process"), pytest.raises(dcp.api.CheckpointException) as raised:
            _hugging_face(shard, tmp_path)
        ((failure, _),) = raised.value.failures.values()
        assert isinstance(failure, ShardAccessError)
        assert named(str(failure)) == {SAVE} and "zero-optim export" in str(failure)


@pytest.mark.parametrize(("shape", "there"), [((4, 2), "(4, 2)"), ((8,), "(8,)"), ((1, 4), "(1, 4)")])
def test_a_parameter_takes_no_tensor_of_another_shape(shape: tuple[int, ...], there: str) -> None:
    parameter, _ = shards("parameter")
    with torch.no_grad(), pytest.raises(ShardAccessError) as raised:
        parameter.copy_(torch.ones(shape))
    assert there in str(raised.value) and "give it a whole tensor of shape (2, 4)" in str(raised.value)
    assert not named(str(raised.value))
