"""Backends: the choice, the override, the loud errors; and what torch makes of the ops."""

import warnings

import pytest
import torch
from kernel_cases import ISAS

import zero_kernels
from zero_kernels import ROW, BackendError, compiled, dispatch

needs_library = pytest.mark.skipif(not ISAS, reason="the CPU library is not built")


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "why_unusable", lambda name: "it was never built")
    monkeypatch.setattr(dispatch, "_warned", False)
    monkeypatch.delenv("ZERO_KERNELS_BACKEND", raising=False)


@needs_library
def test_the_library_is_preferred_on_cpu_tensors() -> None:
    assert zero_kernels.available_backends() == ["cpu", "reference"]
    assert dispatch.select("pack", torch.device("cpu")) is compiled.OPS["pack"]
    assert zero_kernels.available_backends("cuda") == ["reference"]


def test_use_backend_forces_as_a_block_and_as_a_call() -> None:
    chosen = dispatch.select("pack", torch.device("cpu"))
    reference = dispatch.REGISTRY["reference"].ops()["pack"]
    with zero_kernels.use_backend("reference"):
        assert dispatch.select("pack", torch.device("cpu")) is reference
        with zero_kernels.use_backend(None):
            assert dispatch.select("pack", torch.device("cpu")) is chosen
    assert dispatch.select("pack", torch.device("cpu")) is chosen
    zero_kernels.use_backend("reference")
    assert dispatch.select("pack", torch.device("cpu")) is reference
    zero_kernels.use_backend(None)
    assert dispatch.select("pack", torch.device("cpu")) is chosen


def test_the_environment_forces_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_KERNELS_BACKEND", "reference")
    assert dispatch.select("pack", torch.device("cpu")) is dispatch.REGISTRY["reference"].ops()["pack"]
    monkeypatch.setenv("ZERO_KERNELS_BACKEND", "abacus")
    with pytest.raises(BackendError, match=r"'abacus' is unknown. Usable on cpu: .*reference"):
        zero_kernels.grad_stats(torch.ones(3))


def test_an_unknown_name_lists_the_usable_ones() -> None:
    with pytest.raises(BackendError, match=r"'abacus' is unknown. Usable on cpu: .*reference"):
        zero_kernels.use_backend("abacus")
    assert dispatch._forced is None


def test_an_unusable_one_says_why(no_library: None) -> None:
    assert zero_kernels.available_backends() == ["reference"]
    with pytest.raises(BackendError, match=r"'cpu' is unusable.*it was never built.*Usable on cpu: reference"):
        zero_kernels.use_backend("cpu")


@needs_library
def test_a_backend_of_another_device_says_so() -> None:
    with zero_kernels.use_backend("cpu"), pytest.raises(BackendError, match="runs on cpu tensors, not on cuda"):
        dispatch.select("pack", torch.device("cuda"))


def test_a_missing_library_is_said_once_with_the_remedy(no_library: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            zero_kernels.grad_stats(torch.ones(3))
    assert len(caught) == 1
    said = str(caught[0].message)
    assert "zero-optim doctor" in said and "\n" not in said


def test_a_chosen_reference_backend_is_not_warned_of(no_library: None) -> None:
    with warnings.catch_warnings(), zero_kernels.use_backend("reference"):
        warnings.simplefilter("error")
        zero_kernels.grad_stats(torch.ones(3))


@needs_library
def test_an_unusable_instruction_set_lists_the_usable_ones() -> None:
    with pytest.raises(RuntimeError, match="'mmx' is not usable here; usable: .*scalar"):
        compiled.use_isa("mmx")
    assert compiled.status().isa == ISAS[0]


def op_samples() -> dict[str, list[tuple]]:
    def flat(dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.rand(2 * ROW + 5, dtype=torch.float32).to(dtype)

    table = zero_kernels.hyper_table([1e-3, 1e-2], (0.9, 0.99), 1e-8, 0.1, 3)
    rows = torch.tensor([0, 1, -1], dtype=torch.int32)
    flags = torch.zeros(2, dtype=torch.int32)
    grads = [torch.rand(3, 5), torch.rand(7).half()]
    bucket = torch.zeros(300, dtype=torch.bfloat16)
    return {
        "foreach_step": [
            ("adamw", [flat()], [flat()], [flat(), flat()], [], [rows], table),
            (
                *("lion", [flat(torch.float16)], [flat()], [flat()], [flat(torch.bfloat16)], [rows], table),
                *(torch.ones(()), torch.zeros(1), flags),
            ),
            ("sgd_plain", [flat(), flat()], [flat(), flat()], [], [], [rows, rows], table),
        ],
        "ema": [
            ([flat(), flat()], [flat(), flat()], [], [rows, rows], table[:, :1].contiguous()),
            ([flat(), flat()], [flat().char()], [flat(torch.bfloat16)], [rows], table[:, :2].contiguous()),
        ],
        "pack": [(grads, [1, 128], bucket, 0.5, flags), (grads, [0, 20], bucket)],
        "unpack": [(bucket, [1, 128], grads, 0.5)],
        "grad_stats": [([flat(torch.bfloat16), flat()], 2.0), ([flat()],)],
        "hyper_table": [
            (torch.rand(7, 2, dtype=torch.float64), rows[:2], torch.ones(2, dtype=torch.float64), None, table.clone())
        ],
    }


@pytest.mark.parametrize("name", ["reference", *(["cpu"] if ISAS else [])])
@pytest.mark.parametrize("op", op_samples())
def test_opcheck(op: str, name: str) -> None:
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if name == "reference" and ISAS:  # tracing does not depend on the backend, and takes nearly all the time
        tests.pop()
    with zero_kernels.use_backend(name):
        for sample in op_samples()[op]:
            torch.library.opcheck(getattr(torch.ops.zero_kernels, op).default, sample, test_utils=tests)


def test_fakes_check_their_arguments() -> None:
    with pytest.raises(ValueError, match="offsets reach to element 9, but bucket has 8"):
        zero_kernels.pack([torch.zeros(4, device="meta")], [5], torch.zeros(8, device="meta"))
    stats = zero_kernels.grad_stats(torch.zeros(8, device="meta", dtype=torch.float16))
    assert stats.shape == (2,) and stats.dtype == torch.float32 and stats.device.type == "meta"
