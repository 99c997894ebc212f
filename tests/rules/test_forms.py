"""``master="split"`` and ``state_dtype``: the same training in fewer bytes, by every rule, stage and store."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import slow_where
from harness import run_ranks
from sharded_cases import ON_DISK
from torch import Tensor, nn
from zero_optim.rules import Codec, Int8, Root8, Split, Split8, StateTensor

from zero_kernels import ROW

STEPS = 12
MASTER = StateTensor("master")
SPLIT: dict[str, Codec] = {"split": Split(), "split8": Split8()}
every_split = pytest.mark.parametrize("split", SPLIT)


class Block(nn.Module):
    """With norms in fp32, as many bf16 models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 70), nn.Linear(70, 24)
        self.up.bfloat16()
        self.down.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x).bfloat16()))).float()


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(8, 24, generator=torch.Generator().manual_seed(1000 * rank + step))


def _job(stage: int, optimizer: str, param_offload: str | None = None, **options: Any) -> tuple[nn.Module, Any]:
    import zero_optim

    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if stage == 3:
        zero_optim.shard_module(model, units=(Block,), param_offload=param_offload)
    make = getattr(zero_optim, optimizer)
    return model, make(model.named_parameters(), stage=stage, bucket_cap_mb=0.01, **options)


def _train(rank: int, model: nn.Module, opt: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = (model(_batch(rank, step)) - 1).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


WAYS = {
    "stage 0": {"stage": 0},
    "stage 1, paged": {"stage": 1, "state_offload": "paged", "device_budget": 0},
    "stage 2, cpu": {"stage": 2, "state_offload": "cpu"},
    "stage 3": {"stage": 3},
    "stage 3, all on the host": {"stage": 3, "param_offload": "cpu", "state_offload": "cpu"},
    "stage 3, all on a disk": {"stage": 3, "param_offload": ON_DISK, "state_offload": ON_DISK},
}
SLOW = ("stage 2, cpu", "stage 3")  # they are one way in "stage 3, all on the host"


def _masters(rank: int, world_size: int, way: str) -> dict[str, Any]:
    """By master: the losses; and after one step masters and averages, whole."""
    import zero_optim

    found, given = {}, WAYS[way]
    for master in ("fp32", *SPLIT):
        model, opt = _job(**given, optimizer="ShardedAdamW", lr=1e-2, ema_decay=0.9, master=master)
        losses = _train(rank, model, opt, range(1))
        state = zero_optim.full_state_dict(opt, rank=None)["state"]
        opt.sleep(parameters=given["stage"] < 3)
        opt.wake()
        losses += _train(rank, model, opt, range(1, STEPS))
        found[master] = (losses, state, opt.stats()["memory"])
        opt.close()
    return found


@pytest.mark.parametrize("way", slow_where(SLOW.__contains__, WAYS))
def test_a_split_master_trains_as_an_fp32_master(way: str) -> None:
    """Some masters are others after an update: so the losses are compared as numbers."""
    for found in run_ranks(2, _masters, way):
        losses, exact, _ = found["fp32"]
        assert len(set(losses)) == STEPS
        for name, codec in SPLIT.items():
            split, kept, memory = found[name]
            assert split[:2] == pytest.approx(losses[:2], rel=1e-6), name
            assert split == pytest.approx(losses, rel=1e-3), name
            for index, entry in exact.items():
                for kind in ("master", "ema") if "master" in entry else ():  # which are the same after one step
                    values = entry[kind].reshape(-1)
                    wanted = codec.decode_flat(MASTER, [*codec.encode_flat(values), values.bfloat16()])
                    assert torch.equal(kept[index][kind].reshape(-1), wanted), (name, kind)
            assert "master" not in memory
        for master, kind, itemsize in (("fp32", "master", 4), ("split", "master_low", 2), ("split8", "master_low8", 1)):
            numel = 2 * (24 * 70 * 2 + 70 + 24)
            assert way != "stage 0" or found[master][2][kind] == itemsize * numel


@pytest.mark.parametrize(
    ("optimizer", "options", "kinds"),
    [
        ("ShardedAdamW", {}, ["exp_avg", "exp_avg_sq"]),
        ("ShardedAdamW", {"amsgrad": True}, ["exp_avg", "exp_avg_sq", "max_exp_avg_sq"]),
        ("ShardedLion", {"lr": 3e-4}, ["exp_avg"]),
        ("ShardedSGD", {"momentum": 0.9, "nesterov": True}, ["momentum_buffer"]),
        ("ShardedSGD", {}, []),
    ],
    ids=["adamw", "amsgrad", "lion", "sgd", "plain"],
)
def test_8_bit_state_of_any_rule(optimizer: str, options: dict[str, Any], kinds: list[str]) -> None:
    """After one step the fp32 state, rounded once: squares as roots."""
    import zero_optim

    states = {}
    for form in ("fp32", "int8"):
        model, opt = _job(2, optimizer, **{"lr": 3e-3, **options}, state_dtype=form)
        _train(0, model, opt, range(1))
        states[form], memory = zero_optim.full_state_dict(opt)["state"], opt.stats()["memory"]
        opt.close()
    codecs = {kind: Root8() if kind.endswith("sq") else Int8() for kind in kinds}
    assert {kind for kind in memory if kind.endswith("8")} == {f"{k}_{codec.name}" for k, codec in codecs.items()}
    for index, entry in states["fp32"].items():
        for kind, codec in codecs.items():
            wanted = codec.decode_flat(StateTensor(kind), codec.encode_flat(entry[kind].reshape(-1)))
            assert torch.equal(states["int8"][index][kind].reshape(-1), wanted), (index, kind)


# ---- the users' own edits --------------------------------------------------------------------------------------------


EDITS = {
    "made 0": lambda p: p.zero_(),
    "made -0": lambda p: p.copy_(-torch.zeros_like(p)),
    "pruned": lambda p: p.mul_(torch.arange(p.numel()) % 3 == 0),
    "made infinite": lambda p: p[: len(p) // 2].fill_(float("inf")),
    "cut off": lambda p: p.clamp_(min=0),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@every_split
def test_what_lies_beside_a_parameter_that_was_edited_leads_to_no_other(
    split: str, edit: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zero_optim

    monkeypatch.setenv("ZERO_KERNELS_BACKEND", backend)
    p = nn.Parameter(torch.linspace(-3, 3, 500).bfloat16())
    opt = zero_optim.ShardedAdamW([p], lr=1e-3, weight_decay=0.0, master=split)

    def step() -> None:
        p.grad = torch.where(p.detach() < 0.5, 0.5, -0.5).bfloat16()
        opt.step()
        opt.zero_grad()

    for _ in range(3):
        step()
    with torch.no_grad():
        EDITS[edit](p)
    edited = p.detach().clone()
    assert torch.equal(zero_optim.full_state_dict(opt)["state"][0]["master"].bfloat16(), edited)
    step()
    assert not p.isnan().any()
    finite = edited.isfinite()
    assert (p.float() - edited.float())[finite].abs().max() <= 0.016, "a step, and half a unit of 3 in bf16"
    opt.close()


@every_split
def test_a_state_dict_may_be_loaded_before_its_model(split: str) -> None:
    import zero_optim

    torch.manual_seed(0)
    model, opt = _job(0, "ShardedAdamW", lr=1e-2, master=split, state_dtype="int8")
    _train(0, model, opt, range(3))
    state = {name: p.detach().clone() for name, p in model.named_parameters()}
    saved = opt.state_dict()
    full = zero_optim.full_state_dict(opt)["state"]
    other, its = _job(0, "ShardedAdamW", lr=1e-2, master=split, state_dtype="int8")
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    its.load_state_dict(saved)
    other.load_state_dict(state)
    again = zero_optim.full_state_dict(its)["state"]
    for index, entry in full.items():
        assert all(torch.equal(entry[kind], again[index][kind]) for kind in entry)
    plain, plain_opt = _job(0, "ShardedAdamW", lr=1e-2)
    with pytest.raises(zero_optim.StateMismatchError, match="is stored by the codec 'int8': load it with opt.load"):
        zero_optim.load_full_state_dict(plain_opt, saved)
    for one in (opt, its, plain_opt):
        one.close()


@pytest.mark.parametrize(
    ("stage", "store"),
    [*((2, store) for store in (None, "paged", "cpu", "nvme")), *((3, s) for s in (None, "paged", "cpu"))],
)
@every_split
def test_the_plan_is_what_is_held(split: str, stage: int, store: str | None, tmp_path: Path) -> None:
    """At stage 3 with parameters on the host, which visit pages."""
    import zero_optim

    given = {"state_offload": f"nvme:{tmp_path}" if store == "nvme" else store} if store else {}
    if store == "paged" and stage == 2:
        given["device_budget"] = 0
    on_host = "cpu" if stage == 3 else None
    model, opt = _job(stage, "ShardedAdamW", on_host, lr=1e-2, master=split, state_dtype="int8", **given)
    _train(0, model, opt, range(2))
    held, planned = opt.stats()["memory"], zero_optim.memory.plan_of(opt).memory
    kinds = ["pages"] if stage == 3 else held
    assert {kind: planned[kind] for kind in kinds} == {kind: held[kind] for kind in kinds}
    assert bool(held.get("pages")) is (store not in (None, "cpu") if stage == 2 else store != "cpu")
    opt.close()


def test_a_plan_of_what_the_optimizer_refuses_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from zero_optim.cli import main

    for master, dtype, kind in (("split", "fp16", "exp_avg_sq_root8"), ("split8", "fp32", "master_low8")):
        assert main(["plan", "--params", "1e9", "--dtype", dtype, "--master", master]) == 2
        told = f"--master {master}: a part of it is the bf16 parameter, and --dtype is {dtype}"
        assert told in capsys.readouterr().err
        small = ["--master", master, "--state-dtype", "int8", "--stage", "0", "--verbose"]
        assert main(["plan", "--params", "1e9", *small]) == 0
        assert kind in capsys.readouterr().out


# ---- what a load says ------------------------------------------------------------------------------------------------

EIGHT, MOMENTS = {"state_dtype": "int8"}, {"exp_avg", "exp_avg_sq"}
SAID: list[tuple[dict[str, Any], dict[str, Any], set[str]]] = [
    ({}, {**EIGHT, "master": "split8"}, MOMENTS),
    ({"master": "fp32"}, {"master": "split"}, set()),
    ({"master": "split8"}, {"master": "fp32"}, set()),
    (EIGHT, {}, set()),
    (EIGHT, EIGHT, set()),
]


def _said(rank: int, world_size: int, folder: str) -> list[list[list[str]]]:
    """Of each pair and each way to load, the warnings."""
    import zero_optim

    found = []
    for number, (saved_by, loaded_by, _) in enumerate(SAID):
        model, opt = _job(2, "ShardedAdamW", lr=1e-2, **saved_by)
        _train(rank, model, opt, range(1))
        path = Path(folder, f"{number}")
        own, full = opt.state_dict(), zero_optim.full_state_dict(opt)
        zero_optim.checkpoint.save(path, model, opt)
        opt.close()
        of_pair = []
        for way in ("state dict", "full state", "checkpoint"):
            its_model, its = _job(2, "ShardedAdamW", lr=1e-2, **loaded_by)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                if way == "state dict":
                    its.load_state_dict(own)
                elif way == "full state":
                    zero_optim.load_full_state_dict(its, full)
                else:
                    zero_optim.checkpoint.load(path, its_model, its)
            of_pair.append([str(one.message) for one in told])
            its.close()
        found.append(of_pair)
    return found


def test_a_load_into_fewer_bits_says_so_once(tmp_path: Path) -> None:
    """A full state is in fp32, whatever it is made of."""
    first, second = run_ranks(2, _said, str(tmp_path))
    assert all(told == [] for of_pair in second for told in of_pair)
    for (saved_by, loaded_by, names), (by_dict, by_full, by_checkpoint) in zip(SAID, first, strict=True):
        said = [f"{', '.join(sorted(names))}: saved in more bits than are kept here"] if names else []
        assert [told.partition(", and rounded")[0] for told in by_dict] == said, (saved_by, loaded_by)
        assert [told.partition(", and rounded")[0] for told in by_checkpoint] == said, (saved_by, loaded_by)
        narrow = {*MOMENTS} if "state_dtype" in loaded_by else set()
        assert [told.split(":")[0] for told in by_full] == ([", ".join(sorted(narrow))] if narrow else [])


# ---- gradients that overflow a second moment -------------------------------------------------------------------------


def _after(spike: float, **options: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    """Three rows after five steps, in the second of which one gradient of the middle row is ``spike``: weights, state,
    and how many steps were skipped."""
    import zero_optim

    p = nn.Parameter(torch.zeros(3 * ROW, dtype=torch.bfloat16 if "master" in options else torch.float32))
    opt = zero_optim.ShardedAdamW([("p", p)], lr=0.01, **options)
    for step in range(5):
        p.grad = torch.linspace(-0.1, 0.2, 3 * ROW).to(p.dtype)
        if step == 1:
            p.grad[ROW + 3] = spike
        opt.step()
    state, skipped = zero_optim.full_state_dict(opt)["state"][0], opt.stats()["skipped_steps"]
    opt.close()
    return p.detach().float(), state, skipped


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"master": "split"}, {"master": "split8"}], ids=str)
def test_a_finite_gradient_that_overflows_costs_no_weight(options: dict[str, Any]) -> None:
    """fp32 state keeps the weight where it is, for good. Eight bits move it on by no more than usual steps do."""
    for spike in (1e21, 3e38):
        want, found = (_after(spike, state_dtype=form, **options) for form in ("fp32", "int8"))
        assert want[1]["exp_avg_sq"][ROW + 3].isinf() and found[1]["exp_avg_sq"][ROW + 3] > 3e38
        assert found[2] == 0 and all(values.isfinite().all() for values in (found[0], *found[1].values()))
        assert (found[0] - want[0])[ROW + 3].abs() < 0.02
        assert 0.049 < want[0].abs().max() < 0.051 and 0.049 < found[0].abs().max() < 0.055
        of_others = (found[0] - want[0]).view(3, ROW)[::2].abs()
        assert of_others.max() <= 0.01, "a step, where the gradient is nearly 0"
        assert of_others.median() <= 1e-3


def test_a_gradient_that_is_not_finite_loses_its_row_where_it_is_not_skipped() -> None:
    for spike in (float("inf"), float("nan")):
        kept, _, skipped = _after(spike, state_dtype="int8")
        assert skipped == 1 and kept.isfinite().all()
        lost, _, skipped = _after(spike, state_dtype="int8", skip_nonfinite=False)
        assert skipped == 0 and lost.view(3, ROW).isnan().all(1).tolist() == [False, True, False]
        assert lost.view(3, ROW)[::2].isfinite().all()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtypes", "options", "error", "told"),
    [
        (
            (torch.float16,),
            {"master": "split"},
            "ParameterError",
            "'0' is fp16, and a split master is .*or make the optimizer with master=\"fp32\"",
        ),
        ((torch.bfloat16,), {"master": "half"}, "ValueError", "one of None, 'fp32', 'split', 'split8', got 'half'"),
        (
            (torch.bfloat16,),
            {"state_dtype": "fp8"},
            "ValueError",
            "state_dtype must be one of 'fp32', 'bf16', 'int8'",
        ),
        ((torch.bfloat16,), {"state_dtype": torch.int8}, "ValueError", "state_dtype must be one of .*got torch.int8"),
    ],
)
def test_a_form_that_cannot_be_is_refused(dtypes: Any, options: dict[str, Any], error: str, told: str) -> None:
    import zero_optim

    params = [(str(number), nn.Parameter(torch.ones(3, dtype=dtype))) for number, dtype in enumerate(dtypes)]
    with pytest.raises(getattr(zero_optim, error, ValueError), match=told):
        zero_optim.ShardedAdamW(params, **options)


def test_a_group_that_cannot_be_split_is_refused_as_it_is_added() -> None:
    import zero_optim

    opt = zero_optim.ShardedAdamW([nn.Parameter(torch.ones(3).bfloat16())], master="split")
    with pytest.raises(zero_optim.ParameterError, match="is fp16, and a split master"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(3).half())]})
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})  # its own master, as ever
    opt.close()


def _differ(rank: int, world_size: int) -> str:
    import zero_optim

    with pytest.raises(zero_optim.RankMismatchError) as raised:
        zero_optim.ShardedAdamW([nn.Parameter(torch.ones(3))], state_dtype=("fp32", "int8")[rank])
    return str(raised.value)


def test_ranks_with_other_forms_are_told() -> None:
    for told in run_ranks(2, _differ):
        assert "exp_avg_int8" in told
