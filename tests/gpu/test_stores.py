"""State beyond the device on a GPU: the bits of `None`, the memory of two slots, nothing made or pinned on the way."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from device_programs import Program, on, parameters, state_of, train
from places import DEVICE, needs_gpu
from test_units import ROWS, STEPS, WIDTH, Block, Net
from torch import Tensor
from training_cases import assert_bitwise, linear_loss, make_gradients

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BIG_SHAPES = ((1024, 1024),) * 4
BIG_CAP_MB = 2.0  # a bucket for each of BIG_SHAPES, in 16 bits
STORES: Mapping[str, Mapping[str, Any]] = {
    "paged, none stays": {"state_offload": "paged", "device_budget": 0},
    "paged, some stay": {"state_offload": "paged", "device_budget": "100kB"},
    "paged, as there is room": {"state_offload": "paged"},
    "updated on the host": {"state_offload": "cpu"},
}
AWAY = ("paged, none stays", "updated on the host")


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("stage", (0, 1, 2))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_none(dtype: torch.dtype, stage: int, store: str) -> None:
    """An absent gradient, an overflow, a parameter that is thawed, a loss scale where there is one."""
    program = Program(dtype, scaled=dtype == torch.float16, stage=stage, thawed=2)
    want = train(program, DEVICE)
    got = train(Program(**{**vars(program), "store": STORES[store]}), DEVICE)
    assert_bitwise(got.params, want.params, "parameters")
    assert list(got.state) == list(want.state)
    assert_bitwise([*got.state.values()], [*want.state.values()], "state")
    assert (got.skipped, got.scales, got.non_finite) == (want.skipped, want.scales, want.non_finite)
    assert want.skipped == 1


def _units(dtype: torch.dtype, shard: Mapping[str, Any], store: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and state after STEPS steps at stage 3, on the CPU."""
    import zero_optim

    torch.manual_seed(0)
    model = Net(WIDTH).to(DEVICE, dtype)
    zero_optim.shard_module(model, units=(Block,), **shard)
    opt = zero_optim.ShardedAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0, **store)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator).to(DEVICE, dtype)
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    with zero_optim.gather_parameters(model):
        params = [p.detach().cpu().clone() for p in model.parameters()]
    state = [*state_of(opt).values()]
    opt.close()
    return params, state


@pytest.mark.parametrize("store", [None, *STORES])
@pytest.mark.parametrize("param_offload", [None, "cpu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_none_with_units(dtype: torch.dtype, param_offload: str | None, store: str | None) -> None:
    want = _units(dtype, {}, {})
    got = _units(dtype, {"param_offload": param_offload}, {} if store is None else STORES[store])
    assert_bitwise(got[0], want[0], "parameters")
    assert_bitwise(got[1], want[1], "state")


# ---- memory ----------------------------------------------------------------------------------------------------------


class Big:
    """Parameters of 4 Mi elements in bf16, in training."""

    def __init__(self, store: Mapping[str, Any]) -> None:
        import zero_optim

        gc.collect()  # what other tests left in cycles must not be freed in between
        torch.cuda.synchronize()
        self.before = torch.cuda.memory_allocated()
        self.params = parameters(torch.bfloat16, DEVICE, BIG_SHAPES)
        self.opt = zero_optim.ShardedAdamW(self.params, max_grad_norm=1.0, bucket_cap_mb=BIG_CAP_MB, **store)
        self.grads = [on(DEVICE, make_gradients(self.params, 0, step)) for step in range(2)]

    def backward(self, step: int) -> None:
        linear_loss(self.params, self.grads[step % 2]).backward()

    def step(self) -> None:
        self.opt.step()
        self.opt.zero_grad()

    def allocated(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - self.before


def _between_steps(store: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Bytes on the device, and what the optimizer says of its state."""
    big = Big(store)
    for step in range(3):
        big.backward(step)
        big.step()
    allocated, told = big.allocated(), copy.deepcopy(big.opt.stats()["state_offload"])
    big.opt.close()
    return allocated, told


@needs_gpu
def test_at_budget_0_the_device_holds_two_slots() -> None:
    """Master and two moments in fp32: 12 bytes a parameter, a page a bucket."""
    page, pages, slack = 12 * 1024 * 1024, len(BIG_SHAPES), 2**20
    everything, _ = _between_steps({})
    paged, told = _between_steps(STORES["paged, none stays"])
    assert told["device"] == 2 * page and told["host"] == pages * page
    assert abs((everything - paged) - (pages - 2) * page) <= slack
    on_host, told = _between_steps(STORES["updated on the host"])
    assert told["device"] == 0 and told["host"] >= pages * page
    assert abs((everything - on_host) - pages * page) <= slack


@needs_gpu
@pytest.mark.parametrize("store", AWAY)
def test_nothing_is_allocated_after_the_second_step(store: str) -> None:
    """Bytes in use at the same point of each step, and the most that a step needs meanwhile: no page, no gradient."""
    big = Big(STORES[store])
    in_use, temporary, host = [], [], []
    for step in range(6):
        big.backward(step)
        before = big.allocated()
        torch.cuda.reset_peak_memory_stats()
        big.step()
        temporary.append(torch.cuda.max_memory_allocated() - big.before - before)
        in_use.append(big.allocated())
        host.append(big.opt.stats()["state_offload"]["host"])
    big.opt.close()
    assert in_use[2:] == in_use[1:2] * 4 and host[2:] == host[1:2] * 4
    most = max(temporary[2:])  # a page has 12 Mi bytes
    assert most < 256 * 1024, f"a step takes {most:,} bytes for itself"


# ---- what is made once -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often streams are made and host memory is pinned inside."""
    calls: Counter[str] = Counter()
    stream, cudart = torch.cuda.Stream, torch.cuda.cudart

    class Runtime:
        def __getattr__(self, name: str) -> Any:
            calls[name] += 1
            return getattr(cudart(), name)

    class Stream(stream):  # type: ignore[misc,valid-type]
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if "stream_id" not in kwargs:  # else one that is there is looked up
                calls["Stream"] += 1
            return stream(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "cudart", Runtime)
        patched.setattr(torch.cuda, "Stream", Stream)
        yield calls


@needs_gpu
@pytest.mark.parametrize("store", AWAY)
def test_streams_last_and_hooks_pin_nothing(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step may lay buckets out again, in the order in which their gradients came."""
    with counted(monkeypatch) as making:
        big = Big(STORES[store])
    assert making["Stream"] >= 2 and making["cudaHostRegister"] >= 1
    for step in range(4):
        with counted(monkeypatch) as in_backward:
            big.backward(step)
        with counted(monkeypatch) as in_step:
            big.step()
        assert not in_backward
        assert not in_step["Stream"] and (step == 0 or not in_step)
    big.opt.close()
