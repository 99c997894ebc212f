"""The simulated device as torch and programs see it: torch.cuda, views, ops of other libraries, modes, the build."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from simulated_gpu import Unavailable, build, counts, host_access, library, ops
from simulated_gpu.worker import Call


def written_on(stream: torch.cuda.Stream, numel: int = 4) -> Tensor:
    with torch.cuda.stream(stream):
        return torch.empty(numel, device="cuda").fill_(1)


def read_on(stream: torch.cuda.Stream, tensor: Tensor) -> None:
    with torch.cuda.stream(stream):
        tensor.sum()


def pools() -> tuple[list[int], list[int]]:
    return [torch.cuda.Stream().stream_id for _ in range(34)], [
        torch.cuda.Stream(priority=-1).stream_id for _ in range(2)
    ]


def test_streams_are_handed_out_in_turn_as_by_torch(call: Call) -> None:
    normal, urgent = call(pools)[0]
    assert normal == [*range(1, 33), 1, 2]
    assert urgent == [33, 34]


def own_streams(number: int) -> int:
    return len({ops.new_stream().stream_id for _ in range(number)})


def test_streams_of_collectives_are_their_own_until_they_run_out(call: Call) -> None:
    assert call(own_streams, 126)[0] == 126
    with pytest.raises(RuntimeError, match="126 streams for collectives, and all are taken"):
        call(own_streams, 127)


def current_streams() -> None:
    a, b = torch.cuda.Stream(), torch.cuda.Stream()
    default = torch.cuda.default_stream()
    assert torch.cuda.current_stream() == default != a
    with torch.cuda.stream(a):
        with torch.cuda.stream(b):
            assert torch.cuda.current_stream() == b
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == a
        assert torch.cuda.current_stream("cuda") == a
    assert torch.cuda.current_stream(torch.device("cuda", 0)) == default
    assert isinstance(a, torch.Stream) and {a, b, default} == {a, b, torch.cuda.current_stream()}


def the_device() -> None:
    assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
    assert torch.empty(1, device="cuda").device == torch.device("cuda", 0)
    assert torch.cuda.get_device_name() == "simulated GPU"
    torch.cuda.set_device(0)
    with torch.cuda.device("cuda:0"):
        assert not torch.cuda.is_current_stream_capturing()
    for refused in (lambda: torch.cuda.set_device(1), lambda: torch.empty(1, device="cuda:1")):
        with pytest.raises(RuntimeError, match="GPU 1 is used|no device 1"):
            refused()
    for absent in (torch.cuda.memory_stats, torch.cuda.CUDAGraph):
        with pytest.raises(NotImplementedError, match="simulated GPU"):
            absent()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(2, device="cuda").mul_(torch.ones(2))


def random_numbers() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(4, device="cuda"))
    torch.manual_seed(5)
    first = torch.rand(4, device="cuda")
    torch.cuda.manual_seed_all(5)
    assert torch.equal(first, torch.rand(4, device="cuda"))


def saved_and_loaded() -> None:
    x, file = torch.arange(5.0, device="cuda"), io.BytesIO()
    torch.save([x, x[1:]], file)
    file.seek(0)
    again, view = torch.load(file)
    assert again.is_cuda and torch.equal(again, x)
    assert view.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
    file.seek(0)
    assert torch.load(file, map_location="cpu")[0].tolist() == x.tolist()
    assert copy.deepcopy(nn.Parameter(x)).is_cuda


@pytest.mark.parametrize("body", [current_streams, the_device, random_numbers, saved_and_loaded])
def test_torch_cuda_is_the_device(call: Call, body: Callable[[], None]) -> None:
    assert call(body) == (None, [])


def views_share_memory() -> None:
    x = torch.zeros(4, 6, device="cuda")
    for view in (
        x[1:],
        x.t(),
        x.view(-1),
        x.unfold(1, 2, 2),
        x.view(torch.int32),
        x.detach(),
        x.as_strided((2,), (6,)),
    ):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() and view.is_cuda
    before = x._version
    x.view(-1)[3:].add_(1)
    assert x._version > before and x.sum().item() == 21


def optional_lists() -> None:
    """An op of the library's own kind: a list of which some tensors are None, another that is written."""
    names = torch.library.Library("simulated_gpu_test", "DEF")
    names.define("gather_parts(Tensor(a!)[] outs, Tensor?[] parts) -> ()")

    def gather_parts(outs: list[Tensor], parts: list[Tensor | None]) -> None:
        for out, part in zip(outs, parts, strict=True):
            assert out.device.type == "cpu", "the CPU's kernel has the CPU's tensors"
            out.fill_(-1) if part is None else out.copy_(part)

    names.impl("gather_parts", gather_parts, "CPU")
    a = torch.cuda.Stream()
    outs = [torch.zeros(2, device="cuda") for _ in range(2)]
    part = written_on(a, 2)
    torch.cuda.current_stream().wait_stream(a)
    torch.ops.simulated_gpu_test.gather_parts(outs, [part, None])
    read_on(a, outs[0])  # without a wait
    assert torch.cat(outs).tolist() == [1, 1, -1, -1]
    torch.cuda.synchronize()
    names._destroy()


def test_views_share_the_memory(call: Call) -> None:
    assert call(views_share_memory) == (None, [])


def test_ops_of_other_libraries_run_with_their_cpu_kernels(call: Call) -> None:
    _, found = call(optional_lists)
    assert len(found) == 1 and found[0].text.startswith("aten::sum on ")
    assert "what simulated_gpu_test::gather_parts on the default stream wrote" in found[0].text


def seen_by_a_mode() -> list[str]:
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(op._schema.name)
            return op(*args, **(kwargs or {}))

    names: list[str] = []
    x, a = torch.ones(4, device="cuda"), torch.cuda.Stream()
    with Log():
        a.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(a):
            x.mul_(2)
        torch.cuda.Event().record()
        torch.cuda.synchronize()
        ops.launch(a)
        ops.touch(x, True, a, "work")
        ops.alias(x)
        host_access(x, False)
        torch.cuda.memory_allocated()
        x.untyped_storage().resize_(0)
    torch.cuda.synchronize()
    return names


def test_a_dispatch_mode_sees_the_programs_ops_only(call: Call) -> None:
    names = call(seen_by_a_mode)[0]
    assert [name for name in names if name != "aten::detach"] == ["aten::mul_"]


def counted() -> tuple[int, int]:
    before = counts()
    x = torch.ones(4, device="cuda") + 1
    after = counts()
    assert after.blocks == before.blocks + 1 and x.numel() == 4
    return after.launches - before.launches, after.accesses - before.accesses


def test_work_is_counted(call: Call) -> None:
    launches, accesses = call(counted)[0]
    assert launches == 2  # fill_, add
    assert accesses == 3  # fill_ writes; add reads and writes


def test_load_says_that_torch_is_imported_already() -> None:
    program = "import torch, simulated_gpu\nsimulated_gpu.load()"
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True
    )
    assert "RuntimeError: simulated_gpu.load() comes before torch is imported" in done.stderr


def test_what_is_missing_is_a_reason_to_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unavailable, match="there is no C\\+\\+ compiler: no-such-compiler"):
        build._compiler()
    monkeypatch.setattr(build, "TORCH", "2.9")
    with pytest.raises(Unavailable, match="internals of torch 2.9, and this is 2"):
        library()
