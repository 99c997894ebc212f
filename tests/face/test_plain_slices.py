"""Tensor parallelism without DTensors: plain slices with Megatron's marks; what one rank alone has, and mistakes."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from megatron_cases import HYPER, Block, loss_of, make_model
from oracle import MasterAdamW
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from training_cases import Planned, linear_backward, linear_loss, raise_in_backward
from zero_optim import GradientError, ParameterError, RankMismatchError, ShardedAdamW, gather_parameters, shard_module


def make_mesh(data: int, tensor: int = 2) -> dist.DeviceMesh:
    return init_device_mesh("cpu", (data, tensor), mesh_dim_names=("dp", "tp"))


# -- what happens on one rank alone ------------------------------------------------------------------------------------


def marked(shape: tuple[int, ...], *marks: str) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(shape))
    parameter.tensor_model_parallel = False
    for mark in marks:
        setattr(parameter, mark, True)
    return parameter


SLICE, TERM = "tensor_model_parallel", "sequence_parallel"


def on_one_rank(rank: int, world_size: int, stage: int) -> tuple[list[bool], str, list[Tensor]]:
    """An overflow of a copy on rank 3, which does not count it; a gradient of a slice that cannot be used, on rank 1;
    a backward that raises on one data-parallel rank before its first gradient."""
    mesh = make_mesh(2)
    params = [marked((6, 5), SLICE), marked((7,)), marked((5, 3), TERM)]
    names = ("slice", "copy", "term")
    given = {"mesh": mesh["dp"], "tensor_parallel": mesh["tp"]}
    opt = ShardedAdamW(zip(names, params, strict=True), stage=stage, **given)
    grads = [torch.full_like(parameter, 0.5) for parameter in params]
    unchanged = []
    for step in range(3):
        before = [parameter.detach().clone() for parameter in params]
        own = [grads[0], grads[1] * (math.inf if (step, rank) == (1, 3) else 1.0), grads[2]]
        linear_backward(params, own)
        opt.step()
        opt.zero_grad()
        unchanged.append(all(map(torch.equal, before, params)))
    with opt.no_sync():
        linear_backward(params, grads)
    if rank == 1:
        params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(GradientError, match="'slice'|rank 1") as error:
        opt.step()
    for _ in range(2):
        opt.zero_grad()
    before = [parameter.detach().clone() for parameter in params]
    loss = linear_loss(params, grads)
    raises = rank >= 2 and stage > 0  # at stage 0 the others would wait for the average in their backward
    with pytest.raises(Planned) if raises else contextlib.nullcontext():
        (raise_in_backward(loss) if raises else loss).backward()
    for _ in range(2):
        opt.zero_grad()
    assert all(map(torch.equal, before, params))
    linear_backward(params, grads)
    norm = opt.clip_grad_norm_(1e9).item()
    opt.step()
    opt.close()
    return unchanged, str(error.value), [torch.tensor(norm), *(parameter.detach() for parameter in params)]


@pytest.mark.parametrize("stage", [0, 2])
def test_what_happens_on_one_rank_is_known_to_all(stage: int) -> None:
    norm = math.sqrt(60 * 0.5**2 + 7 * 0.5**2 + 15)  # of two slices, a copy, and a sum of two terms of 0.5
    for unchanged, told, (found, *params) in run_ranks(4, on_one_rank, stage):
        assert unchanged == [False, True, False]
        assert "slice" in told
        assert found.item() == pytest.approx(norm)
        oracle = MasterAdamW([torch.ones_like(parameter) for parameter in params])
        for _ in range(3):  # the first, the third, and the last step
            oracle.step([torch.full_like(params[0], 0.5), torch.full_like(params[1], 0.5), torch.ones_like(params[2])])
        for parameter, wanted in zip(params, oracle.params, strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=1e-6, atol=1e-6)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def told(kind: type[Exception], params: Any, **options: Any) -> str:
    with pytest.raises(kind) as error:
        ShardedAdamW(params, **options)
    return str(error.value)


def mistakes(rank: int, world_size: int) -> dict[str, str]:
    mesh = make_mesh(2)
    dp, tp = mesh["dp"], mesh["tp"]
    both = {"mesh": dp, "tensor_parallel": tp}
    cut, copy = marked((4, 3), SLICE), marked((3,))
    within = nn.Parameter(DTensor.from_local(torch.ones(2, 3), tp, [Shard(0)], run_check=False))
    named = [("fc.weight", cut), ("norm", copy)]
    model = make_model(tp.get_group())
    found = {
        "nobody said": told(ParameterError, named, mesh=dp),
        "nobody said, of all ranks": told(ParameterError, named),
        "nobody said, of a term": told(ParameterError, [("norm", marked((3,), TERM))], mesh=dp),
        "a whole mesh": told(ValueError, named, mesh=dp, tensor_parallel=mesh),
        "a text": told(TypeError, named, mesh=dp, tensor_parallel="tp"),
        "the default group": told(ValueError, named, tensor_parallel=tp),
        "the same dimension": told(ValueError, named, mesh=tp, tensor_parallel=tp.get_group()),
        "no marks": told(ParameterError, [("fc.weight", nn.Parameter(torch.ones(3)))], **both),
        "a slice with terms": told(ParameterError, [("fc.weight", marked((4, 3), SLICE, TERM))], **both),
        "a mean": told(ParameterError, [("q", marked((3,), "average_gradients_across_tp_domain"))], **both),
        "other marks": told(RankMismatchError, [("fc.weight", marked((4, 3), *((SLICE,) * (rank % 2))))], **both),
        "other sizes": told(RankMismatchError, [("fc.weight", marked((4 + rank % 2, 3), SLICE))], **both),
        "on some ranks": told(
            RankMismatchError, [("norm", copy)], mesh=dp, **({"tensor_parallel": tp} if rank < 2 else {})
        ),
        "another mesh of DTensors": told(ValueError, [("fc.weight", within)], mesh=dp, tensor_parallel=dp),
        "beside DTensors": told(ParameterError, [("fc.weight", within), ("other", cut)], mesh=dp),
        "a term of experts": told(
            ParameterError,
            [
                {"params": [("fc.weight", cut)]},
                {"params": [("bias", marked((3,), TERM))], "mesh": tp, "grad_divisor": 2},
            ],
            **both,
        ),
        "a second copy": told(ParameterError, [("fc.weight", cut), ("head", marked((3,), "shared"))], **both),
    }
    with pytest.raises(ParameterError) as error:
        shard_module(model, (Block,), mesh=dp)
    found["shard_module was not told"] = str(error.value)
    shard_module(model, (Block,), **both)
    found["shard_module was told other ranks"] = told(ValueError, model.named_parameters(), tensor_parallel=dp)
    opt = ShardedAdamW([("norm", marked((3,)))], mesh=dp)
    with pytest.raises(ParameterError) as error:
        opt.add_param_group({"params": [("added", marked((4, 3), SLICE))]})
    found["added"] = str(error.value)
    opt.close()
    opt = ShardedAdamW(named, **both)
    module = nn.ParameterDict({name.replace(".", "_"): parameter for name, parameter in named})
    with pytest.raises(ParameterError) as error:
        get_optimizer_state_dict(module, opt)
    found["torch.distributed.checkpoint"] = str(error.value)
    opt.close()
    return found


def test_mistakes_are_told_on_every_rank() -> None:
    expected = {
        "nobody said": "'fc.weight' has tensor_model_parallel = True, and which ranks have the other slices is not "
        "known: give the optimizer, or shard_module, tensor_parallel=world_mesh['tp']",
        "nobody said, of all ranks": "tensor_parallel=world_mesh['tp'], or a process group: of one rank, where nothing",
        "nobody said, of a term": "'norm' has sequence_parallel = True, and which ranks have the other slices",
        "a whole mesh": "tensor_parallel is a mesh of 2 dimensions, ('dp', 'tp')",
        "a text": "tensor_parallel is a str: give a DeviceMesh, as mesh['tp'], or a process group",
        "the default group": "several of the same. Give the other dimension, as mesh=world_mesh['dp']",
        "the same dimension": "several of the same. Give the other dimension, as mesh=world_mesh['dp']",
        "no marks": "none of the parameters has a mark, 'fc.weight' for one",
        "a slice with terms": "'fc.weight' has tensor_model_parallel = True, sequence_parallel = True",
        "a mean": "'q' has average_gradients_across_tp_domain = True: the mean of a gradient",
        "other marks": "rank 1 has 'fc.weight': (4, 3) torch.float32, tensor_model_parallel = True of group 0",
        "other sizes": "rank 1 has 'fc.weight': (5, 3) torch.float32, tensor_model_parallel = True of group 0",
        "on some ranks": "of DTensors or with tensor_parallel",
        "another mesh of DTensors": "leave tensor_parallel out",
        "beside DTensors": "'other' has tensor_model_parallel = True, and other parameters are DTensors",
        "a term of experts": "'bias' has sequence_parallel = True, and is in a group of experts",
        "a second copy": "'head' has shared = True, which marks a second copy of what another stage counts, and there",
        "shard_module was not told": "'blocks.0.norm' has sequence_parallel = True, and which ranks",
        "shard_module was told other ranks": "give the optimizer the same tensor_parallel as shard_module, or none",
        "added": "'added' has tensor_model_parallel = True, and which ranks have the other slices is not known",
        "torch.distributed.checkpoint": "'fc.weight' is a plain slice, of which other tensor-parallel ranks",
    }
    for found in run_ranks(4, mistakes):
        assert found.keys() == expected.keys()
        for case, text in expected.items():
            assert text in found[case], f"{case}: {found[case]}"


def nothing_cut(rank: int, world_size: int) -> bool:
    """With one tensor-parallel rank Megatron marks slices, and they are wholes."""
    mesh = make_mesh(2, 1)
    outcomes = []
    for marks in (True, False):
        model = make_model()
        if not marks:
            for parameter in model.parameters():
                vars(parameter).clear()
        given = {"tensor_parallel": mesh["tp"]} if marks else {}
        opt = ShardedAdamW(model.named_parameters(), **HYPER, mesh=mesh["dp"], **given)
        loss_of(model, rank, 0).backward()
        norm = opt.clip_grad_norm_(0.1)
        opt.step()
        opt.close()
        outcomes.append([norm, *(parameter.detach() for parameter in model.parameters())])
    torch.testing.assert_close(*outcomes, rtol=1e-6, atol=1e-7)
    return True


def test_marks_where_nothing_is_cut_change_nothing() -> None:
    assert run_ranks(2, nothing_cut) == [True, True]


def from_meta(rank: int, world_size: int, meta: bool) -> dict[str, Tensor]:
    """Parameters that ``shard_module`` makes anew have the marks of those on ``meta``."""
    mesh = make_mesh(2)
    values = make_model(mesh["tp"].get_group())
    with torch.device("meta") if meta else contextlib.nullcontext():
        model = make_model(mesh["tp"].get_group())
    modules = dict(values.named_modules())
    names = {module: name for name, module in model.named_modules()}

    def fill(module: nn.Module) -> None:
        with torch.no_grad():
            for name, parameter in module.named_parameters(recurse=False):
                parameter.copy_(modules[names[module]].get_parameter(name))

    given = {"init_fn": fill} if meta else {}
    shard_module(model, (Block,), mesh=mesh["dp"], tensor_parallel=mesh["tp"], **given)
    opt = ShardedAdamW(model.named_parameters(), **HYPER)
    for step in range(3):
        loss_of(model, mesh.get_local_rank("dp"), step).backward()
        opt.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
    with gather_parameters(model):
        return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_a_model_from_meta_keeps_its_marks() -> None:
    for found, wanted in zip(run_ranks(4, from_meta, True), run_ranks(4, from_meta, False), strict=True):
        assert found.keys() == wanted.keys()
        assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
