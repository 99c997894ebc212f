"""How many threads an update on the host takes."""

from __future__ import annotations

import warnings

import pytest
import torch
from zero_optim.stores import host_threads as module
from zero_optim.stores.host_threads import Cores, host_threads, threads_of, warn_of_one_thread


def _cores(mask: range, quota: float | None = None, machine: str = "a") -> Cores:
    return Cores(machine, frozenset(mask), quota)


@pytest.mark.parametrize(
    ("everyone", "expected"),
    [
        ([_cores(range(8))], [8]),
        ([_cores(range(8))] * 2, [4, 4]),
        ([_cores(range(8))] * 3, [2, 2, 2]),
        ([_cores(range(8))] * 16, [1] * 16),
        ([_cores(range(4)), _cores(range(4, 8))], [4, 4]),  # bound, each to its own
        ([_cores(range(6)), _cores(range(4, 8))], [5, 3]),  # two cores are shared
        ([_cores(range(8)), _cores(range(8), machine="b")], [8, 8]),
        ([_cores(range(64), quota=6.0)] * 2, [3, 3]),
        ([_cores(range(2), quota=0.5)], [1]),
        ([_cores(range(1))], [1]),
    ],
)
def test_cores_are_shared_with_the_ranks_of_a_machine(everyone: list[Cores], expected: list[int]) -> None:
    assert [threads_of(rank, everyone) for rank in range(len(everyone))] == expected


def test_torch_has_its_threads_again() -> None:
    before = torch.get_num_threads()
    with pytest.raises(ZeroDivisionError), host_threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ZeroDivisionError
    assert torch.get_num_threads() == before


def test_one_thread_on_a_large_machine_is_warned_of_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "cpu_count", lambda: 64)
    with pytest.warns(UserWarning, match=r"state_offload='cpu'.*1 thread.*64 cores.*affinity mask has 1 .*grants 1.5"):
        warn_of_one_thread(1, _cores(range(1), quota=1.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_one_thread(2, _cores(range(2)))
        monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
        warn_of_one_thread(1, _cores(range(1)))
