"""What is wrong with a call of ``shard_module``, or with what ranks do afterwards, is said on every rank, by name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zero_optim
from harness import run_ranks
from sharded_cases import Block, Net, gathered, loss_of, tokens
from torch import nn
from training_cases import error_of

SHORT = timedelta(seconds=3)  # the patience of ranks that are expected to part


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return zero_optim.shard_module(Net(), (Block,), **options)


def still_works(rank: int) -> None:
    """The ranks are in step still."""
    model = sharded()
    opt = zero_optim.ShardedAdamW(model.parameters())
    loss_of(model, tokens(rank, 0)).backward()
    opt.step()
    opt.close()


# -- arguments -------------------------------------------------------------------------------------------------------


class Foreign(nn.Module):
    """No unit of ``Net``."""


def changed(**parameters: Any) -> nn.Module:
    """``Net`` with other parameters, by name in its last norm; or with ``cast``, in another dtype."""
    model = Net()
    for name, value in parameters.items():
        setattr(model.norm, name, value)
    return model


# What is called, the type of the error, and words of it.
BAD: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
    **{
        f"reshard_after_forward={value!r}": (
            lambda value=value: sharded(reshard_after_forward=value),
            "ValueError",
            ("reshard_after_forward", repr(value)),
        )
        for value in (0, 3, -1, 1.0, None, "node")
    },
    **{
        f"prefetch={value!r}": (lambda value=value: sharded(prefetch=value), "ValueError", ("prefetch", repr(value)))
        for value in (-1, 1.5, True, None)
    },
    "param_offload": (lambda: sharded(param_offload="disk"), "ValueError", ("param_offload", "'disk'")),
    "no such class": (lambda: zero_optim.shard_module(Net(), (Foreign,)), "ParameterError", ("Foreign", "Block")),
    "no such name": (lambda: zero_optim.shard_module(Net(), "Bloc"), "ParameterError", ("Bloc", "Block")),
    "no kinds": (lambda: zero_optim.shard_module(Net(), ()), "ParameterError", ("Block",)),
    "no parameters": (
        lambda: zero_optim.shard_module(nn.Sequential(nn.ReLU()), (nn.ReLU,)),
        "ParameterError",
        ("no parameters",),
    ),
    "float64": (
        lambda: zero_optim.shard_module(changed(weight=nn.Parameter(torch.ones(20).double())), (Block,)),
        "ParameterError",
        ("norm.weight", "float64", "cast"),
    ),
    "integers": (
        lambda: zero_optim.shard_module(
            changed(weight=nn.Parameter(torch.ones(20, dtype=torch.int64), requires_grad=False)), (Block,)
        ),
        "ParameterError",
        ("norm.weight", "int64", "cast"),
    ),
    "lazy": (
        lambda: zero_optim.shard_module(nn.Sequential(Block(4), nn.LazyLinear(3)), (Block,)),
        "ParameterError",
        ("1.weight", "forward"),
    ),
    "no init": (lambda: _on_meta(None), "ParameterError", ("Bare", "init_fn")),
    "init_fn raises": (lambda: _on_meta(_raise), "ValueError", ("mine",)),
}


class Bare(nn.Module):
    """Has no ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))


def _on_meta(init_fn: Callable[[nn.Module], object] | None) -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(Bare(), Bare())
    return zero_optim.shard_module(model, (Bare,), init_fn=init_fn)


def _raise(module: nn.Module) -> None:
    raise ValueError("mine")


def _bad_arguments(rank: int, world_size: int) -> list[str]:
    """What is not said as it should be where all ranks give it, and where rank 1 alone does."""
    wrong = []
    for name, (call, kind, words) in BAD.items():
        for alone in (False, True):
            own = not alone or rank == 1
            good = _good_on_meta if name in ("no init", "init_fn raises") else sharded
            found, text = error_of(call if own else good)
            expected = kind if own else "RankMismatchError"
            said = (*words, *(() if own else ("rank 1", kind)))
            if found != expected or not all(word in text for word in said):
                wrong.append(f"{name}, {'on rank 1' if alone else 'on all'}: {found} {text[:200]}")
    still_works(rank)
    return wrong


def _good_on_meta() -> nn.Module:
    return _on_meta(lambda module: nn.init.ones_(module.weight))


def test_arguments_out_of_range():
    for wrong in run_ranks(2, _bad_arguments):
        assert not wrong, "\n".join(wrong)


def _groups(rank: int, world_size: int) -> None:
    group, flat = dist.new_group([0, 1]), dist.init_device_mesh("cpu", (2,))
    cube = dist.init_device_mesh("cpu", (1, 1, 2))
    for options, word in (({"process_group": group, "mesh": flat}, "not both"), ({"mesh": cube}, "one dimension")):
        kind, text = error_of(lambda options=options: sharded(**options))
        assert kind == "ValueError" and word in text
    other = dist.new_group([rank])
    for alone in (dist.new_group([0]), dist.new_group([1])):
        if rank not in dist.get_process_group_ranks(alone):
            kind, text = error_of(lambda alone=alone: sharded(process_group=alone))
            assert kind == "ValueError" and "not in process_group" in text
    model = sharded()
    kind, text = error_of(lambda: zero_optim.ShardedAdamW(model.parameters(), process_group=other))
    assert kind == "ValueError" and "ranks" in text
    still_works(rank)


def test_groups_that_do_not_fit():
    run_ranks(2, _groups)


# -- ranks that disagree ---------------------------------------------------------------------------------------------


def _odd(case: str) -> nn.Module:
    """What rank 1 does."""
    torch.manual_seed(0)
    model, units, options = Net(), (Block,), {}
    if case == "units":
        units = (Block, nn.LayerNorm)
    elif case == "shape":
        model.norm.bias = nn.Parameter(torch.ones(21))
    elif case == "dtype":
        model.norm.half()
    elif case == "frozen":
        model.blocks[2].up.bias.requires_grad_(False)
    elif case == "depth":
        model = Net(depth=4)
    elif case == "tied":
        model.head.weight = nn.Parameter(torch.ones(33, 20))
    else:
        options = {"reshard": {"reshard_after_forward": 1}, "prefetch": {"prefetch": 2}}.get(
            case, {"param_offload": "cpu"}
        )
    return zero_optim.shard_module(model, units, **options)


ODD = {
    "units": "norm.weight",
    "shape": "norm.bias",
    "dtype": "float16",
    "frozen": "frozen",
    "depth": "blocks.3",
    "tied": "head.weight",
    "reshard": "reshard_after_forward",
    "prefetch": "prefetch",
    "offload": "param_offload",
}


def _disagreements(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    errors = {case: error_of((lambda case=case: _odd(case)) if rank == 1 else sharded) for case in ODD}
    still_works(rank)
    return errors


def test_ranks_that_disagree_are_told():
    for errors in run_ranks(2, _disagreements):
        for case, (kind, text) in errors.items():
            assert kind == "RankMismatchError" and "rank 1" in text and ODD[case] in text, f"{case}: {kind} {text}"


# -- out of turn -----------------------------------------------------------------------------------------------------


def _out_of_turn(rank: int, world_size: int) -> list[str]:
    model, plain, other = sharded(), Net(), sharded()
    made = Net()
    opt = zero_optim.ShardedAdamW(made.parameters())
    half = [parameter for name, parameter in model.named_parameters() if name != "blocks.1.up.bias"]
    adamw = zero_optim.ShardedAdamW
    cases: dict[str, tuple[Callable[[], Any], str, tuple[str, ...]]] = {
        "twice": (lambda: zero_optim.shard_module(model, (Block,)), "ParameterError", ("before", "once")),
        "a part": (lambda: zero_optim.shard_module(model.blocks, (Block,)), "ParameterError", ("before", "once")),
        "around": (
            lambda: zero_optim.shard_module(nn.Sequential(model, Block(3)), (Block,)),
            "ParameterError",
            ("before", "once"),
        ),
        "after the optimizer": (
            lambda: zero_optim.shard_module(made, (Block,)),
            "ParameterError",
            ("embedding.weight", "before making the optimizer"),
        ),
        **{
            f"stage={stage}": (lambda stage=stage: adamw(model.parameters(), stage=stage), "ValueError", ("stage", "3"))
            for stage in (0, 1, 2)
        },
        "stage 3 unsharded": (lambda: adamw(plain.parameters(), stage=3), "ParameterError", ("shard_module",)),
        "some of a unit": (
            lambda: adamw(half),
            "ParameterError",
            ("'blocks.1.up.bias' is in unit 'blocks.1' with parameter", "give it all of the unit"),
        ),
        "one module of the root": (
            lambda: adamw(model.norm.parameters()),
            "ParameterError",
            ("'embedding.weight' is in the root unit with parameter 'norm.weight'", "add 'LayerNorm' to units="),
        ),
        "of two models": (
            lambda: adamw([*model.parameters(), *other.parameters()]),
            "ParameterError",
            ("several sharded models",),
        ),
        "and of none": (
            lambda: adamw([*model.named_parameters(), *((f"plain.{n}", p) for n, p in plain.named_parameters())]),
            "ParameterError",
            ("plain.embedding.weight", "in none"),
        ),
        "a parameter twice": (lambda: adamw([*model.parameters(), model.head.weight]), "ParameterError", ("once",)),
    }
    wrong = []
    for name, (call, kind, words) in cases.items():
        found, text = error_of(call)
        if found != kind or not all(word in text for word in words):
            wrong.append(f"{name}: {found} {text[:200]}")
    first = adamw(model.parameters())
    found, text = error_of(lambda: adamw(model.parameters()))
    if found != "ParameterError" or "another optimizer of zero_optim" not in text:
        wrong.append(f"two optimizers: {found} {text[:200]}")
    first.close()
    again = adamw(model.parameters())
    loss_of(model, tokens(rank, 0)).backward()
    again.step()
    again.close()
    opt.close()
    still_works(rank)
    return wrong


def test_calls_out_of_turn():
    for wrong in run_ranks(2, _out_of_turn):
        assert not wrong, "\n".join(wrong)


def _some_units(rank: int, world_size: int) -> None:
    """Whole units may be left out: the optimizer trains the others alone."""
    model = sharded()
    before = gathered(model)
    left_out = {id(parameter) for parameter in model.blocks[1].parameters()}
    opt = zero_optim.ShardedAdamW([p for p in model.parameters() if id(p) not in left_out], weight_decay=0.5)
    for number in range(2):
        loss_of(model, tokens(rank, number)).backward()
        opt.step()
        model.zero_grad()
    moved = {name for name, value in gathered(model).items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if not name.startswith("blocks.1.")}
    opt.close()


def test_units_that_the_optimizer_does_not_have_stay():
    run_ranks(2, _some_units)


# -- ranks that part -------------------------------------------------------------------------------------------------


class Skipping(Net):
    """Calls the blocks that ``numbers`` says."""

    numbers: Any = range(3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for number in self.numbers:
            x = self.blocks[number](x)
        return self.head(self.norm(x))


def _backward_twice(model: Any, opt: Any, rank: int) -> None:
    if rank == 0:
        loss_of(model, tokens(rank, 7)).backward()


def _other_order(model: Any, opt: Any, rank: int) -> None:
    model.numbers = (2, 1, 0) if rank == 1 else (0, 1, 2)


def _stops(model: Any, opt: Any, rank: int) -> None:
    if rank == 1:
        raise StopIteration


PARTINGS = {
    "one goes backward once more": _backward_twice,
    "orders differ": _other_order,
    "one stops": _stops,
}


def _part(rank: int, world_size: int, how: str) -> tuple[str, str]:
    """The error of two steps, the second of which the ranks do not make alike."""
    group = dist.new_group(timeout=SHORT)
    torch.manual_seed(0)
    model = zero_optim.shard_module(Skipping(), (Block,), process_group=group)
    opt = zero_optim.ShardedAdamW(model.parameters())

    def two_steps() -> None:
        for number in range(2):
            if number == 1:
                PARTINGS[how](model, opt, rank)
            loss_of(model, tokens(rank, number)).backward()
            opt.step()
            opt.zero_grad()

    return error_of(two_steps)


@pytest.mark.parametrize("how", list(PARTINGS))
def test_ranks_that_part_end_in_a_typed_error(how: str):
    for rank, (kind, text) in enumerate(run_ranks(2, _part, how, timeout=40)):
        if how == "one stops" and rank == 1:
            assert kind == "StopIteration"
        else:
            assert kind in ("CollectiveError", "RankMismatchError"), f"rank {rank}: {kind} {text}"
