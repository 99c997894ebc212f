"""Gathers that overlap the forward: the same bits, whoever reads the parameters, and really left under way.

``_lazy`` makes it a matter of fact instead of luck: a gather under way shows NaN for the other ranks' parts, and is
made when somebody waits for it.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import zero_optim
from harness import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training_cases import assert_bitwise
from zero_optim.comm.collectives import Comm
from zero_optim.comm.handle import Handle

CAP_MB = 0.002  # several buckets, some with parameters of more than one module
STEPS = 5


class Model(nn.Module):
    """What makes it hard to see who reads a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)  # reads out_proj.weight, never calls out_proj
        self.normed = nn.utils.weight_norm(nn.Linear(16, 16))  # reads weight_g and weight_v in a pre-forward hook
        self.parametrised = nn.utils.parametrizations.orthogonal(nn.Linear(16, 16))
        self.again = nn.Linear(16, 16)  # called inside a checkpoint
        self.mirror = nn.Linear(16, 16)  # never called, and its weight is that of one that is, later
        self.mirror.weight = self.again.weight
        self.direct = nn.Linear(16, 16)  # its weight is read by this module
        self.unused = nn.Linear(16, 3)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.scale = nn.Parameter(torch.ones(16))  # owned by the root

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.normed(x) + self.parametrised(x)
        x = nn.functional.linear(x, self.mirror.weight)
        x = checkpoint(self.again, x, use_reentrant=False)
        x = nn.functional.linear(x, self.direct.weight, self.direct.bias) * self.scale
        return self.head(x).float().square().mean()


def _model(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # weight_norm is old: reading parameters in such a hook is not
        model = Model()
    return model if dtype == torch.float32 else _cast(model, dtype)


def _cast(model: Model, dtype: torch.dtype) -> Model:
    model.parametrised = nn.Linear(16, 16)  # orthogonal knows no 16-bit types
    return model.to(dtype)


def _tokens(rank: int, step: int) -> Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(100 * rank + step))


def _lazy(monkeypatch: pytest.MonkeyPatch, *, nan: bool = True) -> None:
    eager = Comm.all_gather

    class Lazy(Handle):
        def __init__(self, comm: Comm, full: Tensor) -> None:
            self._comm, self._full = comm, full
            if nan:
                kept = comm.own_part(full).clone()
                full.fill_(torch.nan)
                comm.own_part(full).copy_(kept)

        def wait(self) -> None:
            eager(self._comm, self._full).wait()

    def all_gather(comm: Comm, full: Tensor, kind: str = "all_gather", own: Tensor | None = None) -> Handle:
        return Lazy(comm, full) if kind == "all_gather" else eager(comm, full, kind)

    monkeypatch.setattr(Comm, "all_gather", all_gather)


def _train(rank: int, world_size: int, stage: int, dtype: torch.dtype, overlap: bool, wrap: str) -> tuple:
    """Losses, parameters, and for each module with parameters whether the last step left a gather of it under way."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if overlap:
            _lazy(monkeypatch)
        model = _model(dtype)
        called: Callable[[Tensor], Tensor] = torch.compile(model, backend="eager") if wrap == "compile" else model
        opt = zero_optim.ShardedAdamW(called, lr=1e-2, stage=stage, bucket_cap_mb=CAP_MB, overlap_param_gather=overlap)
        losses = []
        for step in range(STEPS):
            loss = called(_tokens(rank, step))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        in_flight = _under_way(opt, model)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        opt.close()
    return losses, state, in_flight


def _under_way(opt: zero_optim.ShardedAdamW, model: nn.Module) -> dict[str, bool]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: bucket.unsharding.pending is not None
        for bucket in opt.engine.reducer.buckets
        for parameter in bucket.params
    }


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_overlap_changes_no_bit(stage: int, world_size: int, dtype: torch.dtype) -> None:
    waiting = run_ranks(world_size, _train, stage, dtype, False, "plain")
    overlapping = run_ranks(world_size, _train, stage, dtype, True, "plain")
    for (losses, state, _), (same_losses, same_state, _) in zip(waiting, overlapping, strict=True):
        assert losses == same_losses
        assert_bitwise(list(state.values()), list(same_state.values()))


def test_called_modules_wait_for_themselves_and_step_for_the_others() -> None:
    for _, _, in_flight in run_ranks(2, _train, 2, torch.float32, True, "plain"):
        assert in_flight["attention.in_proj_weight"] and not in_flight["again.weight"]
        assert not in_flight["attention.out_proj.weight"] and not in_flight["direct.weight"]
        assert not in_flight["unused.weight"]
    for _, _, in_flight in run_ranks(2, _train, 2, torch.float32, False, "plain"):
        assert not any(in_flight.values())


def test_a_compiled_model_waits_at_its_door() -> None:
    plain = run_ranks(2, _train, 2, torch.float32, False, "plain")
    compiled = run_ranks(2, _train, 2, torch.float32, True, "compile")
    for (losses, _, _), (same, _, in_flight) in zip(plain, compiled, strict=True):
        assert losses == same
        assert all(in_flight.values())


class Blocks(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)))


def _compiles_later(rank: int, world_size: int, how: str, first: int) -> tuple[list[float], list[bool]]:
    """Losses, and whether each step has left gathers. What is compiled, at step ``first``, has no graph breaks."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _lazy(monkeypatch)
        model = Blocks()
        opt = zero_optim.ShardedAdamW(model, lr=1e-2, bucket_cap_mb=CAP_MB)
        called: Callable[[Tensor], Tensor] = model
        losses, in_flight = [], []
        for step in range(STEPS):
            if step == first and how == "model":
                called = torch.compile(model, backend="eager", fullgraph=True)
            for block in model if step == first and how == "blocks" else ():
                block.compile(backend="eager", fullgraph=True)
            draw = torch.Generator().manual_seed(10 * rank + step)
            loss = called(torch.randn(4, 16, generator=draw)).square().mean()
            loss.backward()
            opt.step()
            in_flight.append(any(_under_way(opt, model).values()))
            opt.zero_grad()
            losses.append(loss.item())
        opt.close()
        torch.compiler.reset()
    return losses, in_flight


@pytest.mark.parametrize("first", [0, 3])
def test_step_waits_once_a_graph_has_recorded_a_module(first: int) -> None:
    plain = run_ranks(2, _compiles_later, "nothing", 0)
    for how in ("model", "blocks"):
        for (losses, plainly), (same, in_flight) in zip(plain, run_ranks(2, _compiles_later, how, first), strict=True):
            assert losses == same and all(plainly)
            assert in_flight == [step < first for step in range(STEPS)]


def _captures(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether a step leaves gathers before a forward is captured, and after it."""
    model = Blocks()
    opt = zero_optim.ShardedAdamW(model, bucket_cap_mb=CAP_MB)
    found = []
    for _ in range(2):
        for _ in range(2):
            model(torch.ones(4, 16)).sum().backward()
            opt.step()
        found.append(any(_under_way(opt, model).values()))
        with mock.patch("zero_optim.step.param_gather.is_capturing", return_value=True):
            if found == [True]:
                with pytest.raises(zero_optim.ZeroOptimError, match=r"wait_for_parameters\(\) before the capture"):
                    model(torch.ones(4, 16))
            opt.wait_for_parameters()
            model(torch.ones(4, 16))
    opt.close()
    return found[0], found[1]


def test_step_waits_once_cuda_has_captured_a_module() -> None:
    assert run_ranks(2, _captures) == [(True, False)] * 2


def _gathered(model: Model) -> list[Tensor]:
    with zero_optim.gather_parameters(model):
        return [p.detach().clone() for p in model.parameters()]


def _swapped(opt: zero_optim.ShardedAdamW, model: Model) -> list[Tensor]:
    with opt.swap_to_ema():
        return [p.detach().clone() for p in model.parameters()]


def _saved(folder: str, model: Model, opt: zero_optim.ShardedAdamW) -> list[Tensor]:
    zero_optim.checkpoint.save(folder, model, opt)
    other = _model(torch.float32)
    zero_optim.checkpoint.load(folder, other)
    return list(other.parameters())


def _other_readers(rank: int, world_size: int, folder: str) -> tuple:
    with pytest.MonkeyPatch.context() as monkeypatch:
        _lazy(monkeypatch)
        model = _model(torch.float32)
        opt = zero_optim.ShardedAdamW(model, bucket_cap_mb=CAP_MB, ema_decay=0.5)
        read = {
            "state_dict": lambda: list(model.state_dict().values()),
            "load_state_dict": lambda: model.load_state_dict(saved) and list(model.parameters()),
            "keep_vars": lambda: [value + 0 for value in model.state_dict(keep_vars=True).values()],
            "data": lambda: [p.data.clone() for p in model.parameters()],
            "written data": lambda: [p.data.mul_(1.0) for p in model.parameters()],
            "foreach": lambda: torch._foreach_mul([p.detach() for p in model.parameters()], 1.0),
            "foreach of parameters": lambda: torch._foreach_norm(list(model.parameters())),
            "vector": lambda: [nn.utils.parameters_to_vector(model.parameters())],
            "numpy": lambda: [torch.from_numpy(p.detach().numpy().copy()) for p in model.parameters()],
            "items": lambda: [torch.tensor(p.tolist()) for p in model.parameters()],
            "memory": lambda: [p.data_ptr() and p.new_tensor(0) + p.sum() for p in model.parameters()],
            "parameter's deepcopy": lambda: [copy.deepcopy(p) for p in model.parameters()],
            "deepcopy": lambda: list(copy.deepcopy(model.direct).parameters()),
            "pickle": lambda: [pickle.loads(pickle.dumps(p)) for p in model.parameters()],
            "new parameters": lambda: [nn.Parameter(p) for p in model.parameters()],
            "groups": lambda: [p.norm() for group in opt.param_groups for p in group["params"]],
            "full_model_state_dict": lambda: list(zero_optim.full_model_state_dict(model, None).values()),
            "gather_parameters": lambda: _gathered(model),
            "checkpoint": lambda: _saved(folder, model, opt),
            "average": lambda: list(opt.ema_state_dict(rank=None).values()),
            "swapped average": lambda: _swapped(opt, model),
            "master": lambda: opt.refresh_master() or list(model.parameters()),
            "whole state": lambda: [
                t for of in zero_optim.full_state_dict(opt, None)["state"].values() for t in of.values()
            ],
            "sleep": lambda: opt.sleep(parameters=True) or opt.wake() or list(model.parameters()),
            "wait_for_parameters": lambda: opt.wait_for_parameters() or list(model.parameters()),
            "close": lambda: opt.close() or list(model.parameters()),
        }
        finite, in_flight = {}, {}
        saved = copy.deepcopy(model.state_dict())
        for step, (name, reader) in enumerate(read.items()):
            for micro in range(2):
                model(_tokens(rank, step + micro)).backward()
                opt.step()
                opt.zero_grad()
            in_flight[name] = any(_under_way(opt, model).values())
            with torch.no_grad():
                values = reader()
            finite[name] = all(type(v) in (Tensor, nn.Parameter) and bool(v.isfinite().all()) for v in values)
        return finite, in_flight


def test_whoever_reads_waits(tmp_path: Path) -> None:
    for finite, in_flight in run_ranks(2, _other_readers, str(tmp_path)):
        assert all(in_flight.values()), in_flight
        assert all(finite.values()), finite


def _read_by_threads(rank: int, world_size: int) -> tuple[int, int, list[str]]:
    """Two threads read all parameters, as an average or a logger does, while the model trains."""
    model, ended, troubles, reads = _model(torch.float32), threading.Event(), [], []
    opt = zero_optim.ShardedAdamW(model.parameters(), bucket_cap_mb=CAP_MB)
    opt.attach(model)

    def read() -> None:
        try:
            while not ended.is_set():
                # A copy first: ``isfinite`` compares each value with itself, and it may change in between.
                reads.append(all(p.detach().clone().isfinite().all() for p in model.parameters()))
        except Exception as error:
            troubles.append(repr(error))

    model(_tokens(rank, 0)).backward()
    opt.step()
    before, interval = [threading.Thread(target=read) for _ in range(2)], sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    for thread in before:
        thread.start()
    for step in range(60):
        opt.zero_grad()
        model(_tokens(rank, step)).backward()
        opt.step()
    ended.set()
    for thread in before:
        thread.join(60)
    sys.setswitchinterval(interval)
    return opt.stats()["steps"], sum(reads) - len(reads), troubles


@pytest.mark.slow
def test_other_threads_may_read() -> None:
    for found in run_ranks(2, _read_by_threads):
        assert found == (61, 0, [])


def _dropped(rank: int, world_size: int) -> list[Tensor]:
    """The model, once nothing but it is left of a training."""
    model = Blocks()
    opt = zero_optim.ShardedAdamW(model, lr=1e-2, bucket_cap_mb=CAP_MB)
    with pytest.MonkeyPatch.context() as monkeypatch:
        _lazy(monkeypatch)
        for step in range(2):
            model(torch.full((4, 16), 1.0 + rank + step)).sum().backward()
            opt.step()
        assert all(_under_way(opt, model).values())
        del opt
        gc.collect()
    assert all(type(p) is nn.Parameter for p in model.parameters())
    return list(model.parameters())


def test_the_model_of_a_dropped_optimizer_is_whole() -> None:
    first, second = run_ranks(2, _dropped)
    assert_bitwise(first, second)
    assert all(bool(value.isfinite().all()) for value in first)


def _metadata(rank: int, world_size: int) -> tuple[bool, bool]:
    """Whether gathers are still under way after all that reads no value, and parameters are plain once they arrived."""
    model = _model(torch.float32)
    opt = zero_optim.ShardedAdamW(model.parameters(), bucket_cap_mb=CAP_MB)
    opt.attach(model)
    for step in range(2):
        model(_tokens(rank, step)).backward()
        opt.step()
    before = _under_way(opt, model)
    opt.zero_grad()
    opt.zero_grad(set_to_none=False)
    for p in model.parameters():
        assert isinstance(p, nn.Parameter) and p.grad is None and p.requires_grad and p.is_leaf and p._version >= 0
        assert p.shape == p.size() and p.dim() == p.ndim and p.numel() >= 0 and p.device.type == "cpu"
        p.grad = None
    sum(p.numel() for p in model.parameters() if p.requires_grad)
    same = _under_way(opt, model) == before and any(before.values())
    opt.wait_for_parameters()
    return same, all(type(p) is nn.Parameter for p in model.parameters())


def test_what_reads_no_value_leaves_gathers_under_way() -> None:
    assert run_ranks(2, _metadata) == [(True, True)] * 2


def _alias(rank: int, world_size: int, poison: bool) -> tuple[bool, bool]:
    """Whether a tensor that shares a parameter's memory shows NaN before the gather has arrived, and afterwards."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _lazy(monkeypatch, nan=False)
        if poison:
            monkeypatch.setenv("ZERO_OPTIM_DEBUG", "poison")
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        opt = zero_optim.ShardedAdamW(model.parameters())
        opt.attach(model)
        seen = []
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
            alias = model[0].weight.detach()
            opt.step()
            seen.append(bool(alias.isnan().any()))
            opt.zero_grad()
        opt.wait_for_parameters()
        return seen[-1], bool(alias.isnan().any())


@pytest.mark.parametrize("poison", [False, True])
def test_poison_shows_reads_of_an_alias(poison: bool) -> None:
    assert run_ranks(2, _alias, poison) == [(poison, False)] * 2


def _copies(rank: int, world_size: int) -> tuple:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = zero_optim.ShardedAdamW(model.parameters())
    opt.attach(model)
    model(torch.ones(2, 4)).sum().backward()
    opt.step()
    opt.wait_for_parameters()
    buffer = io.BytesIO()
    torch.save(model, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    copied = copy.deepcopy(model)
    outputs = [m(torch.ones(2, 4)) for m in (model, copied, loaded)]
    hooks = [hook for m in (copied, loaded) for child in m for hook in child._forward_pre_hooks.values()]
    return outputs, [(hook.buckets, hook.parameters) for hook in hooks], buffer.tell()


def test_copies_of_an_attached_model_know_nothing_of_the_optimizer() -> None:
    for outputs, hooks, size in run_ranks(2, _copies):
        assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
        assert hooks == [((), ())] * 4
        assert size < 20_000


def _unattached(rank: int, world_size: int) -> bool:
    model = nn.Linear(4, 4)
    opt = zero_optim.ShardedAdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
    return any(_under_way(opt, model).values())


def test_without_attach_step_waits() -> None:
    assert run_ranks(2, _unattached) == [False, False]


def _layout_that_fails(rank: int, world_size: int) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = zero_optim.ShardedAdamW(model.named_parameters(), stage=1)
    opt.attach(model)
    reducer = opt.engine.reducer
    with (
        mock.patch.object(reducer, "_use_layout", side_effect=MemoryError("full")),
        pytest.raises(Exception, match="full"),
    ):
        reducer.lay_out([3, 2, 1, 0])
    model(torch.ones(2, 4))
    model.eval()
    opt.wait_for_parameters()
    with pytest.raises(zero_optim.ZeroOptimError, match="make a new optimizer"):
        opt.step()
    return [value.clone() for value in model.state_dict().values()]


def test_a_model_can_be_saved_after_buckets_could_not_be_made() -> None:
    first, second = run_ranks(2, _layout_that_fails)
    assert_bitwise(first, second)
    assert all(bool(value.isfinite().all()) for value in first)
