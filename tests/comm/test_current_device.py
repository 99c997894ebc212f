"""A rank whose GPU is not the current one: its program has never called ``torch.cuda.set_device``, as none must under
``DistributedDataParallel(device_ids=...)``. Whatever is not told its device would use GPU 0, from every rank.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cells import slow_where
from harness import on_one_gpu
from simulated_gpu.switch import ON_GPU_1
from torch import nn

WIDTH = 16


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)).to("cuda:1")


def _train(model: nn.Module, opt: Any, steps: int = 3) -> None:
    import zero_optim

    scaler = zero_optim.GradScaler(init_scale=4.0)
    for _ in range(steps):
        loss = model(torch.ones(4, WIDTH, device="cuda:1")).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        opt.clip_grad_norm_(1.0)
        opt.clip_grad_norm_(1.0, parameters=[*model.parameters()][:1])
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()


def trained(options: dict[str, Any], sharded: dict[str, Any] | None) -> None:
    """With whatever is read on the host afterwards."""
    import zero_optim

    model = _model()
    if sharded is not None:
        zero_optim.shard_module(model, (nn.Linear,), **sharded)
    opt = zero_optim.ShardedAdamW(model.parameters(), lr=torch.tensor(0.1, device="cuda:1"), **options)
    _train(model, opt)
    opt.stats()
    opt.state_dict()
    opt.observe()
    _train(model, opt)
    zero_optim.sync_buffers(model)
    with zero_optim.gather_parameters(model, writeback=True):
        model[0].weight.data.zero_()
    opt.close()
    assert torch.cuda.current_device() == 0


def saved(background: bool) -> None:
    import zero_optim
    from zero_optim import checkpoint

    model = _model()
    opt = zero_optim.ShardedAdamW(model.parameters())
    _train(model, opt)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, model, opt, step=1, background=background)
        _train(model, opt)
        checkpoint.wait()
        assert checkpoint.load(folder, model, opt).step == 1
    _train(model, opt)
    opt.close()


def agreed() -> tuple[list[int], int]:
    """Which is the current device where objects are gathered, and that of the stream on which NCCL does so."""
    from zero_optim.comm import transport
    from zero_optim.comm.collectives import Comm

    class Gathers(transport.Transport):
        def gather_objects(self, value: object, group: object) -> list[Any]:
            with transport._side_stream():
                seen.append(torch.cuda.current_stream().device_index)
            return [value, value]

    class OfTwo(Comm):
        group, owner = SimpleNamespace(group_name="of two"), "an optimizer"

        def host_waits(self, device: torch.device) -> bool:
            return False

    seen: list[int] = []
    comm = OfTwo(None, torch.device("cuda:1"))
    comm.world_size = 2
    with transport.use(Gathers()):
        assert comm.gather_objects(5, "a test") == [5, 5]
    return seen, torch.cuda.current_device()


def waited_for_in_a_thread() -> int:
    """A thread begins with GPU 0, whatever the program has chosen."""
    from zero_optim.stores.host_memory import Mark

    torch.cuda.set_device(1)
    raised: list[BaseException] = []
    mark = Mark(torch.device("cuda:1"))
    mark.set()

    def wait(guarded: bool) -> None:
        try:
            mark.wait() if guarded else mark.event.synchronize()
        except RuntimeError as error:
            raised.append(error)

    try:
        for guarded in (True, False):
            thread = threading.Thread(target=wait, args=(guarded,))
            thread.start()
            thread.join()
    finally:
        torch.cuda.set_device(0)
    return len(raised)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "stage 2": ({"overlap_param_gather": True}, None),
    "paged, as there is room": ({"state_offload": "paged"}, None),
    "parameters on the host, updated there": ({"state_offload": "cpu"}, {"param_offload": "cpu"}),
}


@pytest.mark.parametrize("options", slow_where("paged, as there is room".__eq__, OPTIONS))
def test_training_uses_the_ranks_gpu(options: str) -> None:
    on_one_gpu(trained, *OPTIONS[options], simulated=ON_GPU_1)


@pytest.mark.parametrize("background", (False, True))
def test_a_checkpoint_uses_the_ranks_gpu(background: bool) -> None:
    on_one_gpu(saved, background, simulated=ON_GPU_1)


@pytest.mark.parametrize(("body", "expected"), [(agreed, ([1], 0)), (waited_for_in_a_thread, 1)])
def test_what_has_no_tensor_uses_the_ranks_gpu(body: Callable[[], Any], expected: Any) -> None:
    assert on_one_gpu(body, simulated=ON_GPU_1) == expected


def measured() -> tuple[int, str]:
    """Of a job on a GPU of which 300 MB are in use that torch has not allocated."""
    import zero_optim

    def mem_get_info(device: Any) -> tuple[int, int]:
        free, total = before(device)
        return free - 300 * 10**6, total

    before, torch.cuda.mem_get_info = torch.cuda.mem_get_info, mem_get_info
    try:
        with zero_optim.memory.track() as memory:
            opt = zero_optim.ShardedAdamW(_model().parameters())
            result = memory.beside_torch(), memory.table()
        opt.close()
        return result
    finally:
        torch.cuda.mem_get_info = before


def test_what_a_gpu_has_in_use_beside_torch_is_measured() -> None:
    nbytes, table = on_one_gpu(measured, simulated=ON_GPU_1)
    assert nbytes == 300 * 10**6
    assert table.endswith("  beside torch's allocator, in no plan: 300 MB")
