"""How many threads an update on the host takes."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from zero_optim.stores import host_threads as module
from zero_optim.stores.host_threads import Cores, host_threads, own_cores, threads_of, warn_of_one_thread


def _cores(mask: range, quota: float | None = None, machine: str = "a") -> Cores:
    return Cores(machine, frozenset(mask), quota)


@pytest.mark.parametrize(
    ("world", "expected"),
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
def test_cores_are_shared_with_the_ranks_of_a_machine(world: list[Cores], expected: list[int]) -> None:
    assert [threads_of(rank, world) for rank in range(len(world))] == expected


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, None),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000", "cpu.max": "800000 100000"}, 3.0),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000"}, 2.0),  # which the container does not see
        ("4:memory:/a\n3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "50000", "cpu/a/cpu.cfs_period_us": "100000"}, 0.5),
        ("3:cpuacct,cpu:/a\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpuacct,cpu:/a\n", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ("no line of a kernel\n", {"cpu.max": "100000 100000"}, None),
        ("2:cpuset:/\n", {"cpuset/cpu.max": "100000 100000"}, None),
        ("0::/\n", {}, None),
        (None, {}, None),
    ],
)
def test_what_a_cgroup_grants(
    membership: str | None,
    files: dict[str, str],
    expected: float | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_CGROUPS", tmp_path)
    monkeypatch.setattr(module, "_MEMBERSHIP", tmp_path / "membership")
    if membership is not None:
        (tmp_path / "membership").write_text(membership)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{text}\n")
    assert own_cores().quota == expected


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
