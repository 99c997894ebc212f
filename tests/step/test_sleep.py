"""An optimizer that sleeps: what of it leaves the device, what raises meanwhile, and that it wakes as it was."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import tables
import torch
import zero_optim
from cells import covering, slow
from harness import run_ranks
from sharded_cases import GivenNet
from torch import Tensor, nn
from torch.nn.modules import module as modules
from training_cases import TINY_CAP_MB, assert_bitwise, linear_backward, make_gradients, make_parameters
from zero_optim import asleep, checkpoint, mode
from zero_optim.mode import Mode
from zero_optim.stores.host_memory import HostMemory

SHAPES = ((17, 9), (300,), (5, 3, 2), (40, 25))
STEPS = 5
STORES = (None, "paged", "cpu", "nvme")
ASLEEP = r"the optimizer is asleep: call opt\.wake\(\)"


class Listed(nn.Module):
    """Parameters that its forward gives ``linear_loss`` of, as ``GivenNet`` does."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(params)


class Job:
    """A model and its optimizer, with an average and tiny buckets."""

    def __init__(self, stage: int, dtype: torch.dtype, store: str | None = None, **form: Any) -> None:
        if stage < 3:
            self.model: nn.Module = Listed(make_parameters(SHAPES, dtype))
            self.backward: Callable[[Any], None] = partial(linear_backward, list(self.model.weights))  # type: ignore
        else:
            self.model = GivenNet([SHAPES[:2], SHAPES[2:3], SHAPES[3:]], dtype)
            zero_optim.shard_module(self.model, units=(type(self.model.units[0]),))  # type: ignore[index]
            self.backward = lambda grads: self.model(grads).backward()
        self.plain: list[Tensor] = [*self.model.parameters()]
        cap = {} if stage == 3 else {"stage": stage, "bucket_cap_mb": TINY_CAP_MB}
        self.opt: Any = zero_optim.ShardedAdamW(
            self.model.named_parameters(), lr=1e-2, ema_decay=0.9, state_offload=store, **cap, **form
        )
        # What a user may have taken, and keeps.
        self.taken = [] if self.model_is_sharded else [p.data for p in self.plain]

    @property
    def model_is_sharded(self) -> bool:
        return self.opt.stage == 3 and self.opt.engine.sharding.world_size > 1

    def step(self, rank: int, step: int) -> None:
        self.backward(make_gradients([torch.empty(shape) for shape in SHAPES], rank, step))
        self.opt.step()

    def held(self) -> list[Tensor]:
        """Collective. Parameters, and the state with its averages, whole."""
        params = [whole.clone() for _, whole in zero_optim.iter_full_parameters(self.model)]
        state = zero_optim.full_state_dict(self.opt, rank=None)["state"]
        return [*params, *(state[index][name] for index in sorted(state) for name in sorted(state[index]))]

    def flat_buffers(self) -> dict[str, list[Tensor]]:
        """What the device holds between steps, by what it is."""
        engine = self.opt.engine
        flats = [bucket.flat for bucket in engine.reducer.buckets]
        return {
            "parameters": [flat.shard if flat.sharded else flat.full for flat in flats],
            "gradients": [bucket.grad_buffer for bucket in engine.reducer.buckets],
            "rest": [
                *(bucket.grad_buffer for bucket in engine.reducer.buckets),
                *engine.reducer.rounds.buffers.storages,
                *engine.store.residents(),
            ],
        }


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# ---- bits ------------------------------------------------------------------------------------------------------------


def _sleep_and_look(job: Job, parameters: bool) -> None:
    """Sleep and wake, after a step. Everything has left the device in between, and is where it was afterwards."""
    opt, buffers = job.opt, job.flat_buffers()
    before = job.held()
    plain = not job.model_is_sharded
    edges = [p[:1] for p in job.plain] if plain else []
    saved = opt.state_dict()["state"] if opt.engine.store.keeps_views else {}
    addresses = [flat.data_ptr() for flat in buffers["parameters"]]

    opt.sleep(parameters=parameters)
    asleep_now = opt.stats()
    assert asleep_now["sleep"]["mode"] == "ASLEEP"
    kinds = {kind for kind, nbytes in asleep_now["memory"].items() if nbytes}
    assert kinds <= (set() if parameters else {"parameters", "padding"})
    assert ("parameters" in kinds) == (not parameters)
    assert asleep_now["state_offload"]["device"] == 0
    assert _nbytes(buffers["rest"]) == 0
    assert (_nbytes(buffers["parameters"]) == 0) == parameters
    if parameters and plain:
        if job.plain[0].device.type == "cpu":  # a simulated GPU takes every read for a write
            assert all(p.isnan().all() for p in job.plain)
        with pytest.raises(RuntimeError):
            job.plain[0].data.zero_()
    assert not opt.engine.store.footprint()["device"]
    opt.wake()

    assert opt.stats()["sleep"]["mode"] == "OWN"
    assert_bitwise(job.held(), before)
    assert all(p.grad is None for p in job.plain)
    if parameters and plain:
        here = [flat.data_ptr() for flat in buffers["parameters"]]
        ends = [address + _nbytes([flat]) for address, flat in zip(here, buffers["parameters"], strict=True)]
        for p, view, edge in zip(job.plain, job.taken, edges, strict=True):
            assert any(first <= p.data_ptr() < end for first, end in zip(here, ends, strict=True))
            assert p.data_ptr() == view.data_ptr() == edge.data_ptr()
            assert_bitwise([view, edge], [p, p[:1]])
    elif not parameters:
        assert addresses == [flat.data_ptr() for flat in buffers["parameters"]]
    now = opt.state_dict()["state"] if saved else {}
    for key, state in saved.items():
        for name in state.keys() - {"step", "master"}:  # a split master is joined: a copy
            old, new = (getattr(of[key][name], "local", of[key][name]) for of in (saved, now))
            if isinstance(old, Tensor) and old.numel():
                assert old.data_ptr() == new.data_ptr()


def _life(rank: int, world_size: int, stage: int, dtype: torch.dtype, stores: Sequence[Any], folder: str) -> None:
    plain = Job(stage, dtype)
    trained = []
    for step in range(STEPS):
        plain.step(rank, step)
        plain.opt.zero_grad()
        trained.append(plain.held())
    plain.opt.close()
    for store in stores:
        job = Job(stage, dtype, f"nvme:{folder}" if store == "nvme" else store)
        for step in range(STEPS):
            job.step(rank, step)
            if step == 2:
                job.opt.zero_grad()
            if step:
                _sleep_and_look(job, parameters=step != 1)
            job.opt.zero_grad()
            assert_bitwise(job.held(), trained[step], f"{stage}, {dtype}, {store}, step {step}")
        job.opt.close()


RANKS_AND_STAGE = ((1, 2), (1, 3), *((2, stage) for stage in range(4)))
LIVES = list(itertools.product(RANKS_AND_STAGE, (torch.float32, torch.bfloat16), STORES))
IN_PAIRS = covering(LIVES)


@pytest.mark.parametrize("in_pairs", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_it_wakes_as_it_was_and_trains_as_if_it_had_not_slept(world_size: int, in_pairs: bool, tmp_path: Path) -> None:
    stores: dict[Any, list[Any]] = {}
    for where, dtype, store in LIVES:
        if where[0] == world_size and ((where, dtype, store) in IN_PAIRS) is in_pairs:
            stores.setdefault((where[1], dtype), []).append(store)
    for (stage, dtype), some in stores.items():
        run_ranks(world_size, _life, stage, dtype, some, str(tmp_path))


def _kept(rank: int, world_size: int) -> None:
    """Memory is taken once."""
    job = Job(2, torch.bfloat16)
    job.step(rank, 0)
    taken: list[int] = []
    memory = HostMemory._memory

    def count_memory(self: HostMemory, nbytes: int) -> Tensor:
        taken.append(nbytes)
        return memory(self, nbytes)

    with mock.patch.object(HostMemory, "_memory", count_memory):
        for parameters in (True, True, False, True):
            job.opt.sleep(parameters=parameters)
            kept = job.opt.stats()["sleep"]
            job.opt.wake()
            assert len(taken) == 1
            assert job.opt.stats()["sleep"]["host"] == kept["host"] > 0
    job.opt.close()


def test_host_memory_is_taken_once() -> None:
    run_ranks(1, _kept)


# ---- memory ----------------------------------------------------------------------------------------------------------


def _runs(job: Job) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in job.opt.engine.store.residents()}


def _one_run_a_kind(rank: int, world_size: int, stage: int, form: dict[str, Any]) -> None:
    job = Job(stage, torch.bfloat16, **form)
    kinds = {tensor.name for shard in job.opt.engine.states.shards for tensor in shard.stored}
    assert len(_runs(job)) == len(kinds) < len(job.opt.engine.store.residents())
    job.step(rank, 0)  # from here on buckets are in the order of the backward
    buckets = job.opt.engine.reducer.buckets
    assert len(_runs(job)) == len(kinds) < len(kinds) * len(buckets)
    job.opt.zero_grad()
    calls: list[str] = []
    take, copy = asleep.allocate, asleep.Rest._copy

    def counted_take(tensor: Tensor) -> Tensor:
        calls.append("allocate")
        return take(tensor)

    def counted_copy(self: asleep.Rest, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        copy(self, (calls.append("copy") or pair for pair in pairs))

    before, runs = job.held(), sum(tensor.nbytes for tensor in job.opt.engine.store.residents())
    job.opt.sleep()
    assert runs <= job.opt.stats()["sleep"]["host"] < runs + 4096 * len(kinds) + 512 * len(kinds) * len(buckets)
    with mock.patch.object(asleep, "allocate", counted_take), mock.patch.object(asleep.Rest, "_copy", counted_copy):
        job.opt.wake()
    # Each is copied before the next has memory. Gradients have theirs while the copies run.
    unsharded = sum(not bucket.flat.sharded for bucket in buckets)
    assert calls == ["allocate", "copy"] * len(kinds) + ["allocate"] * unsharded
    assert_bitwise(job.held(), before)
    job.opt.close()


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("form", [{}, {"master": "split8", "state_dtype": "int8"}], ids=["fp32", "int8"])
def test_state_of_all_buckets_lies_in_one_run_for_each_name(stage: int, form: dict[str, Any]) -> None:
    run_ranks(2, _one_run_a_kind, stage, form)


def _grown(rank: int, world_size: int) -> None:
    """Parameters that are added have runs of their own, until buckets are laid out again. A state dict can be saved."""
    job = Job(2, torch.bfloat16, state_dtype="int8")
    job.step(rank, 0)
    job.opt.zero_grad()
    runs = len(_runs(job))
    added = nn.Parameter(torch.ones(300, dtype=torch.bfloat16, device=job.plain[0].device))
    job.opt.add_param_group({"params": [("added", added)]})
    assert len(_runs(job)) == 2 * runs
    held = job.opt.state_dict()["state"]
    job.opt.sleep()
    job.opt.wake()
    now, file = job.opt.state_dict(), io.BytesIO()
    torch.save(now, file)  # raises where tensors of two dtypes lie in one storage
    assert len(file.getvalue()) < 2**20
    for key, state in held.items():
        for name, value in state.items():
            if isinstance(value, Tensor):
                assert_bitwise([value], [now["state"][key][name]])
    job.opt.close()


def test_added_parameters_sleep_in_runs_of_their_own() -> None:
    run_ranks(1, _grown)


# ---- meanwhile -------------------------------------------------------------------------------------------------------


def _calls(job: Job, folder: str) -> list[Callable[[], object]]:
    opt, model = job.opt, job.model
    return [
        opt.step,
        opt.zero_grad,
        lambda: opt.clip_grad_norm_(1.0),
        opt.state_dict,
        lambda: opt.load_state_dict({}),
        lambda: zero_optim.full_state_dict(opt),
        lambda: zero_optim.load_full_state_dict(opt, None),
        lambda: checkpoint.save(folder, model, opt),
        lambda: checkpoint.load(folder, model, opt),
        lambda: opt.add_param_group({"params": [nn.Parameter(torch.zeros(3))]}),
        lambda: opt.swap_to_ema().__enter__(),
        opt.ema_state_dict,
        opt.sleep,
        lambda: opt.no_sync().__enter__(),
        opt.refresh_master,
        opt.wait_for_parameters,
        opt.observe,
        lambda: opt.attach(model),
        lambda: setattr(opt, "state", {}),
    ]


def _meanwhile(rank: int, world_size: int, folder: str) -> None:
    for stage in (1, 2, 3):
        grads = make_gradients([torch.empty(shape) for shape in SHAPES], rank, 1)
        plain, job = Job(stage, torch.bfloat16), Job(stage, torch.bfloat16)
        for parameters in (False, True):
            for one in (plain, job):
                one.step(rank, 0)
                one.opt.zero_grad()
            job.opt.sleep(parameters=parameters)
            for call in _calls(job, folder):
                with pytest.raises(zero_optim.ZeroOptimError, match=ASLEEP):
                    call()
            # A forward may look at parameters that are awake; a backward may not come to them.
            with pytest.raises(zero_optim.ZeroOptimError, match=ASLEEP):
                if parameters and not job.model_is_sharded:
                    nn.Linear.__call__(_linear_of(job.plain[0]), torch.ones(1, SHAPES[0][1], dtype=torch.bfloat16))
                else:
                    job.backward(grads)
            if parameters:
                reads = [lambda model: next(zero_optim.iter_full_parameters(model)), zero_optim.full_model_state_dict]
                reads += [lambda model: zero_optim.gather_parameters(model).__enter__()] if job.model_is_sharded else []
                for read in reads:
                    with pytest.raises(zero_optim.ZeroOptimError, match=ASLEEP):
                        read(job.model)
            job.opt.wake()
            job.opt.wake()
            job.opt.zero_grad()
            plain.opt.zero_grad()
            for one in (plain, job):
                one.step(rank, 2)
                one.opt.zero_grad()
            assert_bitwise(job.held(), plain.held(), f"stage {stage}, parameters={parameters}")
        plain.opt.close()
        job.opt.close()


def _linear_of(weight: nn.Parameter) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = weight
    return linear


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_called_meanwhile_raises_and_harms_nothing(world_size: int, tmp_path: Path) -> None:
    run_ranks(world_size, _meanwhile, str(tmp_path / "checkpoints"))


def _unapplied(rank: int, world_size: int) -> None:
    refused = partial(pytest.raises, zero_optim.GradientError, match=r"no step has applied: call opt\.step\(\)")
    for stage in range(4):
        job = Job(stage, torch.float32)
        grads = make_gradients([torch.empty(shape) for shape in SHAPES], rank, 0)
        job.backward(grads)
        with refused():
            job.opt.sleep()
        job.opt.step()
        job.opt.sleep()  # they were applied
        job.opt.wake()
        with job.opt.no_sync():
            job.backward(grads)
        with refused():
            job.opt.sleep()
        job.opt.zero_grad()
        job.opt.sleep()
        job.opt.wake()
        if stage < 3:
            job.step(rank, 1)
            job.plain[0].grad = torch.ones_like(job.plain[0])
            with refused():
                job.opt.sleep()
            job.opt.zero_grad()
            job.step(rank, 2)
            job.backward(grads)  # into gradients that were applied
            with refused():
                job.opt.sleep()
        job.opt.close()


def _without_gradients(rank: int, world_size: int) -> None:
    """Memory that is taken again holds what others have left there."""
    take = asleep.allocate

    def take_used(tensor: Tensor) -> Tensor:
        take(tensor).view(torch.uint8).fill_(0xFF)
        return tensor

    for stage in range(4):
        plain, job = Job(stage, torch.float32), Job(stage, torch.float32)
        for one in (plain, job):
            one.step(rank, 0)
            one.opt.zero_grad()
        job.opt.sleep()
        with mock.patch.object(asleep, "allocate", take_used):
            job.opt.wake()
        assert not any(bucket.grad_buffer.any() for bucket in job.opt.engine.reducer.buckets if not bucket.flat.sharded)
        for one in (plain, job):
            one.opt.step()
            one.step(rank, 1)
        assert job.opt.stats()["skipped_steps"] == 0
        assert_bitwise(job.held(), plain.held(), f"stage {stage}")
        plain.opt.close()
        job.opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_without_gradients_finds_none_after_waking(world_size: int) -> None:
    run_ranks(world_size, _without_gradients)


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_that_are_not_applied_are_not_lost(world_size: int) -> None:
    run_ranks(world_size, _unapplied)


def _misused(rank: int, world_size: int) -> None:
    job = Job(2, torch.float32)
    job.step(rank, 0)
    job.opt.zero_grad()
    with pytest.raises(zero_optim.RankMismatchError, match=r"sleep\(parameters=True\)"):
        job.opt.sleep(parameters=rank == 1)
    with job.opt.swap_to_ema(), pytest.raises(zero_optim.ZeroOptimError, match=r"within swap_to_ema\(\)"):
        job.opt.sleep()
    kept = job.plain[2].data
    if rank == 1:
        job.plain[2].data = kept.clone()
    error = (zero_optim.ParameterError, r"weights\.2 was moved") if rank == 1 else (zero_optim.RankMismatchError, "")
    with pytest.raises(error[0], match=error[1]):
        job.opt.sleep(parameters=True)
    job.plain[2].data = kept
    job.opt.sleep()
    job.opt.wake()
    job.opt.close()
    with pytest.raises(zero_optim.ClosedError):
        job.opt.wake()


def test_misuse_is_told_on_every_rank() -> None:
    run_ranks(2, _misused)


# ---- failures --------------------------------------------------------------------------------------------------------


def _no_memory(self: HostMemory, nbytes: int) -> Tensor:
    raise zero_optim.OffloadError(f"no {nbytes:,} bytes of host memory")


def _no_device_memory(after: int) -> Callable[[Tensor], Tensor]:
    """The device has memory for so many tensors, and not for the next."""
    take, calls = asleep.allocate, itertools.count()

    def raising(tensor: Tensor) -> Tensor:
        if next(calls) == after:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return take(tensor)

    return raising


def _no_copy(after: int) -> Callable[..., None]:
    copy = asleep.Rest._copy

    def failing(pairs: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        pairs = iter(pairs)
        yield from itertools.islice(pairs, after)
        next(pairs)  # its memory is there
        raise RuntimeError("a copy fails")

    return lambda self, pairs: copy(self, failing(pairs))


def _fails(call: Callable[[], object], rank: int, error: type[Exception], patch: Any) -> None:
    """Rank 1 fails in a call, and both raise."""
    expected = error if rank == 1 else zero_optim.RankMismatchError
    with patch if rank == 1 else contextlib.nullcontext(), pytest.raises(expected):
        call()


def _failing(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        job = Job(stage, torch.bfloat16)
        job.step(rank, 0)
        job.opt.zero_grad()
        before, buffers = job.held(), job.flat_buffers()
        bytes_before = {kind: _nbytes(tensors) for kind, tensors in buffers.items()}
        sleep = partial(job.opt.sleep, parameters=True)
        _fails(sleep, rank, zero_optim.OffloadError, mock.patch.object(HostMemory, "_memory", _no_memory))
        assert {kind: _nbytes(tensors) for kind, tensors in buffers.items()} == bytes_before
        assert job.opt.stats()["sleep"]["mode"] == "OWN"
        assert_bitwise(job.held(), before)
        sleep()
        moved, gradients = len(job.opt.engine.asleep._moved), len(buffers["gradients"]) if stage == 1 else 0
        for after in (0, 1, moved - 1, *([moved + gradients - 1] if gradients else [])):
            failures = [(zero_optim.OutOfMemoryError, mock.patch.object(asleep, "allocate", _no_device_memory(after)))]
            if after < moved:
                failures.append((RuntimeError, mock.patch.object(asleep.Rest, "_copy", _no_copy(after))))
            for error, patch in failures:
                _fails(job.opt.wake, rank, error, patch)
                assert _nbytes([*buffers["parameters"], *buffers["rest"]]) == 0
                assert job.opt.stats()["sleep"]["mode"] == "ASLEEP"
        job.opt.wake()
        assert_bitwise(job.held(), before)
        job.step(rank, 1)
        job.opt.close()


def test_a_failure_of_one_rank_is_raised_on_all_and_loses_nothing() -> None:
    run_ranks(2, _failing)


# ---- the end ---------------------------------------------------------------------------------------------------------


def _closing(rank: int, world_size: int) -> None:
    for stage in (1, 3):
        for closes in (True, False):
            hooks = len(modules._global_forward_pre_hooks)
            job = Job(stage, torch.bfloat16)
            job.step(rank, 0)
            before = [whole.clone() for _, whole in zero_optim.iter_full_parameters(job.model)]
            job.opt.sleep(parameters=True)
            if closes:
                job.opt.close()
                with pytest.raises(zero_optim.ClosedError):
                    job.opt.wake()
            job.opt = None
            gc.collect()
            assert len(modules._global_forward_pre_hooks) == hooks
            found = [whole.clone() for _, whole in zero_optim.iter_full_parameters(job.model)]
            assert_bitwise(found, before, f"stage {stage}, closes: {closes}")
            again = zero_optim.ShardedAdamW(job.model.parameters(), lr=1e-2)
            job.backward(make_gradients([torch.empty(shape) for shape in SHAPES], rank, 1))
            again.step()
            again.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_closed_asleep_the_parameters_come_back(world_size: int) -> None:
    run_ranks(world_size, _closing)


# ---- the table -------------------------------------------------------------------------------------------------------


def test_every_cell_of_the_modes() -> None:
    cells = tables.table(mode.Mode.__doc__, "event")
    assert {event for event, _ in cells} == {
        "swap_to_ema",
        "its end",
        "sleep",
        "wake",
        "step",
        "a save",
        "backward",
    }
    for (event, before), after in cells.items():
        if after == "--":
            continue
        job = Job(2, torch.float32)
        job.step(0, 0)
        job.opt.zero_grad()
        with contextlib.ExitStack() as stack:
            swap = job.opt.swap_to_ema()
            if before == "ASLEEP":
                job.opt.sleep()
            elif before == "AVERAGE":
                stack.enter_context(swap)
            other = job.opt.swap_to_ema()
            calls: dict[str, Callable[[], object]] = {
                "swap_to_ema": lambda other=other: stack.enter_context(other),
                "its end": stack.close,
                "sleep": job.opt.sleep,
                "wake": job.opt.wake,
                "step": job.opt.step,
                "a save": lambda job=job: zero_optim.full_state_dict(job.opt),
                "backward": lambda job=job: job.backward([p.detach().clone() for p in job.plain]),
            }
            if after == "raises":
                with pytest.raises(zero_optim.ZeroOptimError):
                    calls[event]()
                assert job.opt.engine.mode.now is Mode[before]
            else:
                calls[event]()
                assert job.opt.engine.mode.now is Mode[after]
        job.opt.close()
