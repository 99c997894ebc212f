"""What a sharded model's parameters let one do: metadata always, values within ``gather_parameters`` alone.

Nothing answers with what one rank happens to hold, and nothing reads memory that is not there.
"""

from __future__ import annotations

import contextlib
import copy
import io
import math
import os
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import zero_optim
from harness import run_ranks
from sharded_cases import Block, Net, gathered, loss_of, tokens
from torch import Tensor, nn
from training_cases import difference
from zero_optim import FlatShard, ShardAccessError
from zero_optim.params.param_shard import StateDictShard

NAME = "blocks.0.up.weight"
KEEP = {"reshard_after_forward": False}


class Scaled(Block):
    """With a parameter of one element."""

    def __init__(self, width: int = 20) -> None:
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def scaled_net() -> nn.Module:
    model = Net()
    model.blocks[1] = Scaled()
    return model


def sharded(make: Callable[[], nn.Module] = Net, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return zero_optim.shard_module(make(), (Block,), **options)


def sharded_and_optimizer(**options: Any) -> tuple[nn.Module, Any]:
    model = sharded(**options)
    return model, zero_optim.ShardedAdamW(model.named_parameters(), lr=1e-2)


def step(model: nn.Module, opt: Any, rank: int, number: int) -> float:
    loss = loss_of(model, tokens(rank, number))
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


def error_of(call: Callable[[], Any]) -> tuple[type[BaseException] | None, str]:
    """Type and text of what it raises; None where it raises nothing."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None, ""


# -- metadata --------------------------------------------------------------------------------------------------------


def _metadata(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model, plain = Net(), Net()
    model.blocks[1].requires_grad_(False)
    plain.blocks[1].requires_grad_(False)
    zero_optim.shard_module(model, (Block,))
    expected = dict(plain.named_parameters())
    assert [name for name, _ in model.named_parameters()] == list(expected)
    for name, parameter in model.named_parameters():
        like = expected[name]
        assert isinstance(parameter, nn.Parameter) and isinstance(parameter, FlatShard)
        for of in ("shape", "ndim", "dtype", "device", "requires_grad", "is_leaf", "nbytes", "itemsize", "layout"):
            assert getattr(parameter, of) == getattr(like, of), of
        assert (parameter.numel(), len(parameter), parameter.stride()) == (like.numel(), len(like), like.stride())
        assert parameter.is_contiguous() and parameter.element_size() == 4 and parameter.grad is None
        assert name in repr(parameter) and str(tuple(like.shape)) in repr(parameter)
    assert model.head.weight is model.embedding.weight
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.get_parameter(NAME).requires_grad = True
    assert [name for name, p in model.named_parameters() if p.requires_grad] == [NAME]
    assert model.to("cpu") is model.float() is model.cpu() is model
    assert model.get_parameter(NAME).to(torch.float32) is model.get_parameter(NAME)


def test_metadata_is_the_parameters():
    run_ranks(2, _metadata)


# -- reads and writes while sharded ------------------------------------------------------------------------------------

Access = Callable[[Any], Any]

# Beside what ``params/test_remedies.py`` tries on each kind of shard.

READS: dict[str, Access] = {
    "p.item()": lambda p: p.item(),
    "np.array": np.array,
    "p.to_sparse": lambda p: p.to_sparse(),
    "torch.cat": lambda p: torch.cat([p, torch.ones(p.shape)]),
    "F.linear": lambda p: F.linear(torch.ones(1, p.shape[-1]), p),
    "vmap": torch.vmap(lambda p: p * 2),
    "torch.func.grad": torch.func.grad(lambda p: p.sum()),
    "backward": lambda p: p.sum().backward(),
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p]),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "torch.save": lambda p: torch.save([p], io.BytesIO()),
}
READS_OF_ONE: dict[str, Access] = {
    "bool(p)": bool,
    "float(p)": float,
    "int(p)": int,
    "complex(p)": complex,
    "if p > 1": lambda p: 1 if p > 1 else 2,
    "math.sqrt(p)": math.sqrt,
    "p.item()": lambda p: p.item(),
}
WRITES: dict[str, Access] = {
    "p += 1": lambda p: p.__iadd__(1),
    "p[0] = 1": lambda p: p.__setitem__(0, 1.0),
    "zero_": lambda p: p.zero_(),
    "init": nn.init.normal_,
    "set_": lambda p: p.set_(),
    "resize_": lambda p: p.resize_(3),
}
THROUGH_DATA: dict[str, Access] = {
    "p.detach().numpy()": lambda p: p.detach().numpy(),
    "p.data.item()": lambda p: p.data.item(),
    "p.data.add_": lambda p: p.data.add_(1),
    "p.data = tensor": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.zeros(p.numel()), [p]),
    "np.from_dlpack": lambda p: np.from_dlpack(p.detach()),
}


def _refusals(rank: int, world_size: int) -> list[str]:
    """What was not refused by ShardAccessError, or without naming parameter and remedy."""
    model = sharded(scaled_net)
    before = gathered(model)
    weight, one = model.get_parameter(NAME), model.blocks[1].scale
    tried = [(name, weight, access) for name, access in (READS | WRITES | THROUGH_DATA).items()]
    tried += [(name, one, access) for name, access in READS_OF_ONE.items()]
    wrong = []
    for grad in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        for name, parameter, access in tried:
            with grad():
                kind, text = error_of(lambda access=access, parameter=parameter: access(parameter))
            label = NAME if parameter is weight else "blocks.1.scale"
            if kind is not ShardAccessError or label not in text or "gather_parameters" not in text:
                wrong.append(f"{name}: {kind} {text[:150]}")
    assert not difference(list(gathered(model).values()), list(before.values()))
    return wrong


def test_reads_and_writes_are_refused_by_name():
    for wrong in run_ranks(2, _refusals):
        assert not wrong, "\n".join(wrong)


# -- plain parameters kept from before --------------------------------------------------------------------------------


def _kept(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = scaled_net()
    kept = [model.get_parameter(NAME), model.blocks[1].scale, model.head.weight]
    zero_optim.shard_module(model, (Block,))
    with torch.no_grad():
        loss_of(model, tokens(rank, 0))
    before = gathered(model)
    for parameter in kept:
        assert parameter.isnan().all() and parameter.clone().isnan().all() and (parameter + 1).isnan().all()
        with torch.no_grad():
            for write in (
                lambda p: p.add_(1),
                lambda p: p.fill_(1),
                lambda p: p.zero_(),
                lambda p: p.copy_(torch.ones(p.shape)),
                lambda p: p.data.fill_(1),
                lambda p: p.__setitem__(0, 1.0),
                lambda p: torch._foreach_add_([p], 1.0),
                lambda p: p.detach().numpy().fill(1),
            ):
                kind, _ = error_of(lambda write=write, parameter=parameter: write(parameter))
                assert kind is RuntimeError
        assert parameter.isnan().all()
    assert not difference(list(gathered(model).values()), list(before.values()))


def test_plain_parameters_read_nan_and_take_no_writes():
    run_ranks(2, _kept)


def _poisoned(rank: int, world_size: int) -> None:
    """With poison, what views a freed unit reads NaN."""
    os.environ["ZERO_OPTIM_DEBUG"] = "poison"
    try:
        model = sharded()
        taken: list[Tensor] = []
        model.blocks[1].up.register_forward_pre_hook(lambda module, args: taken.append(module.weight.view(-1)))
        with torch.no_grad():
            loss_of(model, tokens(rank, 0))
        assert taken[0].isnan().all()
        assert not any(value.isnan().any() for value in gathered(model).values())
    finally:
        del os.environ["ZERO_OPTIM_DEBUG"]


def test_poison_shows_who_reads_what_was_freed():
    run_ranks(2, _poisoned)


# -- gradients and hooks ----------------------------------------------------------------------------------------------


def _gradients(rank: int, world_size: int) -> None:
    model, opt = sharded_and_optimizer()
    weight = model.get_parameter(NAME)
    fired: list[str] = []
    weight.register_hook(lambda grad: fired.append("hook"))
    weight.register_post_accumulate_grad_hook(lambda parameter: fired.append(type(parameter).__name__))
    assert weight.grad is None
    loss_of(model, tokens(rank, 0)).backward()
    assert fired == ["hook", "Parameter"]
    assert model.get_parameter(NAME) is weight
    assert isinstance(weight.grad, FlatShard) and weight.grad.shape == weight.shape
    with pytest.raises(ShardAccessError, match=r"clip_grad_norm_"):
        weight.grad.norm()
    with pytest.raises(ShardAccessError):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    weight.grad = None
    assert weight.grad is None
    weight.grad = torch.ones(weight.shape)
    assert torch.equal(weight.grad, torch.ones(weight.shape))
    with pytest.raises(RuntimeError, match="size"):
        weight.grad = torch.ones(3)
    del weight.grad
    model.zero_grad(set_to_none=False)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    before = gathered(model)
    opt.step()
    assert not difference(list(gathered(model).values()), list(before.values()))
    opt.close()


def test_grad_is_that_of_the_plain_parameter():
    run_ranks(2, _gradients)


def _kept_gradients(rank: int, world_size: int, how: str) -> None:
    """A gradient that the user keeps over zero_grad stays what it was, though its memory is freed as a rule."""
    model, opt = sharded_and_optimizer()
    loss_of(model, tokens(rank, 0)).backward()
    opt.step()
    if how == "itself":
        kept = [model.get_parameter(NAME).grad, model.head.weight.grad]
    elif how == "detached":
        kept = [model.get_parameter(NAME).grad.detach(), model.head.weight.grad.data]
    else:
        kept = [SimpleNamespace(local=p.grad.local) for p in (model.get_parameter(NAME), model.head.weight)]
    values = [grad.local.clone() for grad in kept]
    for number in (1, 2):
        opt.zero_grad()
        loss_of(model, tokens(rank, number)).backward()
        opt.step()
        new = [model.get_parameter(NAME).grad, model.head.weight.grad]
        assert all(torch.equal(grad.local, value) for grad, value in zip(kept, values, strict=True))
        assert all(g.local.numel() == 0 or not torch.equal(g.local, v) for g, v in zip(new, values, strict=True))
    opt.zero_grad()
    del kept, new
    loss_of(model, tokens(rank, 3)).backward()
    opt.zero_grad()
    memory = opt.stats()["memory"]
    assert memory["gradients"] == memory["communication"] == 0
    opt.close()


@pytest.mark.parametrize("how", ["itself", "detached", "local"])
def test_gradients_that_are_kept_stay(how: str):
    run_ranks(2, _kept_gradients, how)


def _other_optimizer(rank: int, world_size: int) -> None:
    model = sharded()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model, tokens(rank, 0)).backward()
    with torch.no_grad():
        loss_of(model, tokens(rank, 0))  # the root is sharded again
    with pytest.raises(ShardAccessError):
        opt.step()
    for inputs in (list(model.parameters()), [model.get_parameter(NAME)]):
        with pytest.raises(RuntimeError):
            torch.autograd.grad(loss_of(model, tokens(rank, 1)), inputs, allow_unused=True)


def seen_by_numpy(rank: int, world_size: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Parameters, without and with a hook that takes arrays of what it sees; and of the gradients' arrays, a sum."""
    trained: list[dict[str, Tensor]] = []
    sums: list[float] = []
    for looks in (False, True):
        model, opt = sharded_and_optimizer()
        for block in model.blocks if looks else ():
            block.register_forward_hook(lambda module, *_: sums.append(float(module.up.weight.detach().numpy().sum())))
        for number in range(3):
            loss_of(model, tokens(rank, number)).backward()
            if looks:
                sums.extend(float(p.grad.local.numpy().sum()) for p in model.parameters() if p.grad is not None)
            opt.step()
            opt.zero_grad()
        trained.append(gathered(model))
        opt.close()
    return (*trained, sums)


def test_what_numpy_has_seen_stays_in_memory_and_training_goes_on():
    """torch resizes no memory that an array may show."""
    for without, seen, sums in run_ranks(2, seen_by_numpy):
        assert not difference([*seen.values()], [*without.values()])
        assert np.isfinite(sums).all() and any(sums)


def test_an_optimizer_of_torch_is_refused():
    run_ranks(2, _other_optimizer)


# -- state dicts -----------------------------------------------------------------------------------------------------


def _kinds(model: nn.Module) -> set[type]:
    """Of what the state dicts of the model and of modules within it hold."""
    modules = (model, model.blocks[1], model.blocks[1].up, model.head)
    return {type(value) for module in modules for value in module.state_dict().values()}


def _state_dicts(rank: int, world_size: int, options: dict[str, Any]) -> None:
    model, opt = sharded_and_optimizer(**options)
    batch = tokens(rank, 0)
    assert list(model.state_dict()) == list(Net().state_dict())
    assert _kinds(model) == {StateDictShard}
    loss = loss_of(model, batch)
    assert _kinds(model) == {StateDictShard}  # in the middle of a step
    loss.backward()
    assert _kinds(model) == {StateDictShard}
    with torch.no_grad():
        loss_of(model, batch)
    assert _kinds(model) == {StateDictShard}
    within: list[set[type]] = []
    hook = model.blocks[1].register_forward_hook(lambda *_: within.append(_kinds(model)))
    loss_of(model, batch).backward()
    hook.remove()
    assert within == [{StateDictShard}]
    opt.step()
    opt.zero_grad()

    whole, shards = gathered(model), copy.deepcopy(model.state_dict())
    assert {type(value) for value in shards.values()} == {StateDictShard}
    for state in (shards, whole):
        step(model, opt, rank, 3)
        with torch.no_grad():
            loss_of(model, batch)
        assert difference(list(gathered(model).values()), list(whole.values()))
        model.load_state_dict(state)
        assert not difference(list(gathered(model).values()), list(whole.values()))
    model.blocks[1].load_state_dict({name: torch.full(v.shape, 0.25) for name, v in whole_of(model.blocks[1]).items()})
    assert all((value == 0.25).all() for value in whole_of(model.blocks[1]).values())

    with pytest.raises(RuntimeError, match=r"blocks\.2\.up\.weight"):
        model.load_state_dict({name: value for name, value in whole.items() if name != "blocks.2.up.weight"})
    with pytest.raises(RuntimeError, match=r"odd"):
        model.load_state_dict({**whole, "odd": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"head\.weight"):
        model.load_state_dict({**whole, "head.weight": torch.ones(3, 3)})
    with pytest.raises(zero_optim.ZeroOptimError, match="assign"):
        model.load_state_dict(whole, assign=True)
    opt.close()


def whole_of(module: nn.Module) -> dict[str, Tensor]:
    with zero_optim.gather_parameters(module):
        return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("options", [{}, KEEP])
def test_state_dicts_hold_shards_and_load_both_kinds(options: dict[str, Any]):
    run_ranks(2, _state_dicts, options)


def _loaded_while_whole(rank: int, world_size: int) -> None:
    """Where an evaluation has left units unsharded, shards and whole tensors are loaded, and used at once."""
    model, batch = sharded(**KEEP), tokens(rank, 0)
    whole = gathered(model)
    halved = {name: value * 0.5 for name, value in whole.items()}
    shards = model.state_dict()
    saved = {name: copy.deepcopy(value) for name, value in shards.items()}
    with torch.no_grad():
        first = loss_of(model, batch)
        model.load_state_dict(halved)
        second = loss_of(model, batch)
        model.load_state_dict(saved)
        assert torch.equal(loss_of(model, batch), first) and not torch.equal(first, second)
        for name, parameter in model.named_parameters():  # unsharded: ordinary
            parameter.copy_(halved[name])
        assert torch.equal(loss_of(model, batch), second)
    assert not difference(list(gathered(model).values()), list(halved.values()))


def test_what_is_loaded_after_an_evaluation_is_used():
    run_ranks(2, _loaded_while_whole)


def _copied_into_kept_shards(rank: int, world_size: int) -> None:
    """Shards that were taken before: a whole tensor goes into all of the parameter, wherever that is now."""
    for options in ({}, KEEP):
        model = sharded(**options)
        kept, whole = dict(model.named_parameters()), gathered(model)
        with zero_optim.gather_parameters(model, writeback=True), torch.no_grad():
            for name, shard in kept.items():
                shard.copy_(whole[name] * 2)
                with pytest.raises(ShardAccessError, match="whole now"):
                    shard.copy_(shard)
        doubled = [value * 2 for value in whole.values()]
        assert not difference(list(gathered(model).values()), doubled)
        with torch.no_grad():
            loss_of(model, tokens(rank, 0))
            for name, shard in kept.items():
                shard.copy_(whole[name])
            loss = loss_of(model, tokens(rank, 0))
        assert torch.equal(loss, loss_of(sharded(), tokens(rank, 0)).detach())
        assert not difference(list(gathered(model).values()), list(whole.values()))


def test_whole_tensors_are_copied_into_shards_taken_before():
    run_ranks(2, _copied_into_kept_shards)


def _failed_gather(rank: int, world_size: int) -> None:
    from zero_optim.params.flat_params import FlatParams

    model = Net()
    model.blocks[1].up.requires_grad_(False)  # so that the unit has a second flat tensor
    zero_optim.shard_module(model, (Block,))
    opt = zero_optim.ShardedAdamW(model.parameters())
    before, copy_out, calls = gathered(model), FlatParams.copy_out, []

    def failing(flat: FlatParams) -> Tensor:
        calls.append(flat)
        if len(calls) == 4:
            raise MemoryError
        return copy_out(flat)

    FlatParams.copy_out = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(MemoryError), zero_optim.gather_parameters(model):
            pass
    finally:
        FlatParams.copy_out = copy_out  # type: ignore[method-assign]
    assert all(isinstance(parameter, FlatShard) for parameter in model.parameters())
    model.load_state_dict({name: value * 2 for name, value in before.items()})
    assert not difference(list(gathered(model).values()), [value * 2 for value in before.values()])
    step(model, opt, rank, 0)
    opt.close()


def test_gathering_that_fails_half_way_leaves_shards():
    run_ranks(2, _failed_gather)


# -- gather_parameters -----------------------------------------------------------------------------------------------


def _gathering(rank: int, world_size: int) -> None:
    model, opt = sharded_and_optimizer()
    torch.manual_seed(0)
    expected = dict(Net().named_parameters())
    with zero_optim.gather_parameters(model):
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter and torch.equal(parameter, expected[name])
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
        state = model.state_dict()
        read = model.get_parameter(NAME).detach()
    assert {type(value) for value in state.values()} == {Tensor}
    step(model, opt, rank, 0)
    assert torch.equal(read, expected[NAME])
    assert all(torch.equal(state[name], value) for name, value in expected.items())

    with zero_optim.gather_parameters(model.blocks[1]):
        held = {name: type(parameter) is nn.Parameter for name, parameter in model.named_parameters()}
    assert held == {name: name.startswith("blocks.1.") for name in held}
    with zero_optim.gather_parameters(model.blocks[1].up):
        assert type(model.blocks[1].down.weight) is nn.Parameter  # of the same unit

    with zero_optim.gather_parameters(model):
        with zero_optim.gather_parameters(model.blocks[0]):
            total = model.get_parameter(NAME).sum()
        assert model.get_parameter(NAME).sum() == total
    with zero_optim.gather_parameters(model.blocks[0]):
        with zero_optim.gather_parameters(model):
            model.head.weight.sum()
        assert model.get_parameter(NAME).sum() == total
        with pytest.raises(ShardAccessError):
            model.head.weight.sum()
    assert all(isinstance(parameter, FlatShard) for parameter in model.parameters())
    step(model, opt, rank, 1)
    opt.close()


def test_gathered_parameters_are_ordinary():
    run_ranks(2, _gathering)


def _writing(rank: int, world_size: int) -> None:
    model, opt = sharded_and_optimizer()
    step(model, opt, rank, 0)
    before = gathered(model)
    refusal = pytest.raises(ShardAccessError, match=r"blocks\.1\.up\.bias.*writeback")
    with refusal, zero_optim.gather_parameters(model), torch.no_grad():
        model.blocks[1].up.bias.add_(1)
    with pytest.raises(ValueError, match="mine"), zero_optim.gather_parameters(model):
        raise ValueError("mine")
    with contextlib.suppress(ValueError), zero_optim.gather_parameters(model):
        if rank == 1:
            raise ValueError("of one rank, which writes nothing")
    failure = pytest.raises(ValueError if rank == 1 else zero_optim.RankMismatchError, match="of rank 1")
    with failure, zero_optim.gather_parameters(model, writeback=True), torch.no_grad():
        model.blocks[1].up.bias.fill_(7)
        if rank == 1:
            raise ValueError("of rank 1")
    gather, nested = zero_optim.gather_parameters(model), zero_optim.gather_parameters(model, writeback=True)
    with pytest.raises(ShardAccessError, match="within another"), gather, nested:
        pass
    assert not difference(list(gathered(model).values()), list(before.values()))
    with zero_optim.gather_parameters(model.blocks[1], writeback=True), torch.no_grad():
        model.blocks[1].up.bias.fill_(float(rank + 5))
    assert (gathered(model)["blocks.1.up.bias"] == 5).all(), "rank 0's values count"
    with zero_optim.gather_parameters(model, writeback=True):
        model.blocks[1].up.bias.data = torch.full_like(model.blocks[1].up.bias, rank + 3.0)  # assigned, not copied into
    misfit, gather = pytest.raises(ShardAccessError, match=r"blocks\.1\.up\.bias.*\(2,\)"), zero_optim.gather_parameters
    with misfit, gather(model, writeback=True):
        model.blocks[1].up.bias.data = torch.zeros(2)
    with refusal, gather(model):
        model.blocks[1].up.bias.data = model.blocks[1].up.bias.detach().clone()
    after = gathered(model)
    assert (after.pop("blocks.1.up.bias") == 3).all(), "rank 0's values count"
    assert not difference(list(after.values()), [v for name, v in before.items() if name in after])
    with zero_optim.gather_parameters(model, writeback=True):
        model.load_state_dict({name: torch.full(value.shape, 0.25) for name, value in before.items()})
    assert all((value == 0.25).all() for value in gathered(model).values())
    step(model, opt, rank, 1)
    opt.close()


def test_writes_need_writeback_and_are_rank_0s():
    run_ranks(2, _writing)


def _changed(rank: int, stage: int, how: str, dtype: torch.dtype) -> list[Tensor]:
    """Weights of a training after each of whose steps they are loaded, written, or edited through ``data``."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    state = {name: value * 0.5 for name, value in model.state_dict().items()}
    if stage == 3:
        zero_optim.shard_module(model, (Block,), **(KEEP if how == "through data" else {}))
    opt = zero_optim.ShardedAdamW(model.parameters(), lr=1e-3, stage=None if stage == 3 else stage)
    for number in range(3):
        step(model, opt, rank, number)
        if how == "loaded":
            model.load_state_dict(state)
        elif how == "through data":
            with torch.no_grad():
                loss_of(model, tokens(rank, 9))  # leaves all whole
            for parameter in model.parameters():
                parameter.data.mul_(0.75)
            opt.refresh_master()
        else:
            with zero_optim.gather_parameters(model, writeback=True), torch.no_grad():
                for parameter in model.parameters() if how == "written" or rank == 0 or stage < 3 else ():
                    parameter.mul_(0.75)
    step(model, opt, rank, 3)
    return list(gathered(model).values())


def _change_parity(rank: int, world_size: int, how: str) -> str:
    dtypes = (torch.float32, torch.bfloat16)
    found = [difference(*(_changed(rank, stage, how, dtype) for stage in (3, 2))) for dtype in dtypes]
    return "; ".join(filter(None, found))


@pytest.mark.parametrize("how", ["loaded", "through data", "written", "written on rank 0"])
def test_masters_follow_what_is_changed(how: str):
    assert run_ranks(2, _change_parity, how) == [""] * 2


def _refused_within(rank: int, world_size: int) -> None:
    """In a forward and in a backward; then all goes on."""
    model, opt = sharded_and_optimizer()

    def gather(*_: Any) -> None:
        with zero_optim.gather_parameters(model):
            pass

    for number, register in enumerate(
        (model.blocks[1].register_forward_hook, model.blocks[2].down.weight.register_hook)
    ):
        hook = register(gather)
        with pytest.raises(ShardAccessError, match="forward or backward"):
            loss_of(model, tokens(rank, number)).backward()
        hook.remove()
        opt.zero_grad()
        step(model, opt, rank, number)
    loss_of(model, tokens(rank, 5)).backward()
    with pytest.raises(ShardAccessError, match="step"), zero_optim.gather_parameters(model):
        opt.step()
    opt.step()
    opt.close()


def test_gathering_in_a_forward_or_backward_is_refused():
    run_ranks(2, _refused_within)


# -- copies ------------------------------------------------------------------------------------------------------------


def _copies(rank: int, world_size: int) -> dict[str, Any]:
    model, opt = sharded_and_optimizer()
    step(model, opt, rank, 0)
    for make in (copy.deepcopy, pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        for module in (model, model.blocks[0]):
            with pytest.raises(ShardAccessError, match=r"gather_parameters"):
                make(module)
    whole = gathered(model)
    with zero_optim.gather_parameters(model):
        made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        block = copy.deepcopy(model.blocks[0])
        pickled = pickle.dumps(model)
        logits = model(tokens(0, 0)).detach()
    for copied in made:
        assert {type(parameter) for parameter in copied.parameters()} == {nn.Parameter}
        assert not difference(list(copied.state_dict().values()), list(whole.values()))
        assert torch.equal(copied(tokens(0, 0)), logits)
        assert copied.head.weight is copied.embedding.weight
        plain = torch.optim.SGD(copied.parameters(), lr=0.1)
        loss_of(copied, tokens(rank, 0)).backward()
        plain.step()
    block(torch.ones(2, 20)).sum().backward()
    assert not difference(list(gathered(model).values()), list(whole.values()))
    again = zero_optim.ShardedAdamW(made[0].parameters(), stage=1)
    step(made[0], again, rank, 0)
    again.close()
    zero_optim.shard_module(made[1], (Block,))
    step(model, opt, rank, 1)
    opt.close()
    return {"pickled": pickled, "whole": whole}


def test_copies_within_are_ordinary_models():
    results = run_ranks(2, _copies)
    for result in results:
        model = pickle.loads(result["pickled"])  # here there are no ranks
        assert not difference(list(model.state_dict().values()), list(result["whole"].values()))
        loss_of(model, tokens(0, 0)).backward()


# -- the whole module --------------------------------------------------------------------------------------------------

REFUSED_OF_MODULES: dict[str, Callable[[nn.Module], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.to(torch.bfloat16),
    "double": lambda model: model.double(),
    "type": lambda model: model.type(torch.float16),
    "meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "apply": lambda model: model.apply(
        lambda module: nn.init.zeros_(module.weight) if hasattr(module, "weight") else None
    ),
    "norm": lambda model: sum(parameter.square().sum() for parameter in model.parameters()),
    "functional_call": lambda model: torch.func.functional_call(
        model, {name: torch.zeros(p.shape) for name, p in model.named_parameters()}, (tokens(0, 0),)
    ),
    "parametrize": lambda model: nn.utils.parametrizations.weight_norm(model.blocks[0].up),
    "AveragedModel": lambda model: torch.optim.swa_utils.AveragedModel(model),
}


def _of_modules(rank: int, world_size: int, options: dict[str, Any]) -> list[str]:
    """What is neither refused nor harmless: a typed error, and the model trains on as before."""
    model, opt = sharded_and_optimizer(**options)
    step(model, opt, rank, 0)
    before, wrong = gathered(model), []
    for name, call in REFUSED_OF_MODULES.items():
        kind, text = error_of(lambda call=call: call(model))
        if kind is None or not issubclass(kind, zero_optim.ZeroOptimError):
            wrong.append(f"{name}: {kind} {text[:150]}")
    assert not difference(list(gathered(model).values()), list(before.values()))
    step(model, opt, rank, 1)
    opt.close()
    return wrong


@pytest.mark.parametrize("options", [{}, KEEP])
def test_casts_and_edits_of_whole_modules_are_refused(options: dict[str, Any]):
    for wrong in run_ranks(2, _of_modules, options):
        assert not wrong, "\n".join(wrong)


def _cast_after_evaluation(rank: int, world_size: int) -> str:
    """Where an evaluation has left parameters unsharded, the next one finds it out; then all is as it was."""
    model, losses = sharded(**KEEP), []
    for attempt in range(3):
        with torch.no_grad():
            try:
                losses.append(loss_of(model, tokens(rank, 0)).item())
            except zero_optim.ParameterError as error:
                losses.append(str(error))
        if attempt == 0:
            model.half()
    first, error, again = losses
    found = "parameter 'embedding.weight'" in error and "cast" in error
    same = {parameter.dtype for parameter in model.parameters()} == {torch.float32} and first == again
    return "" if found and same else str(losses)


def test_casts_are_refused_where_parameters_are_unsharded():
    assert run_ranks(2, _cast_after_evaluation) == [""] * 2


def _replaced(rank: int, world_size: int) -> None:
    model, opt = sharded_and_optimizer()
    step(model, opt, rank, 0)
    held = model.blocks[0].up.weight
    model.blocks[0].up.weight = nn.Parameter(torch.zeros(held.shape))
    for number in (1, 2):
        with pytest.raises(zero_optim.ParameterError, match=r"blocks\.0\.up\.weight.*replaced"):
            step(model, opt, rank, number)
    model.blocks[0].up.weight = held
    opt.zero_grad()
    step(model, opt, rank, 3)
    opt.close()


def test_a_parameter_that_was_replaced_is_found_out():
    run_ranks(2, _replaced)
