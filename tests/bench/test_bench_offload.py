"""``zero-optim bench offload``: bytes are counted, stores are held to what they are made of, and rows add up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import bench_pages
import bench_sleep
import pytest
import torch
from harness import run_ranks
from test_bench_train_step import call
from zero_optim import ShardedAdamW
from zero_optim.bench import contest, offload, offload_contenders, offload_links, train_step
from zero_optim.bench.offload import OffloadAlone, OffloadContest, held_to, hidden, make_rows
from zero_optim.bench.offload_contenders import CPU, NAMES, NONE, NVME, PAGED, SMALL_PAGED, WAITING, Training, Update
from zero_optim.bench.offload_links import BLOCK_BYTES, DiskLink, Link
from zero_optim.bench.rows.op import WIDTH
from zero_optim.bench.timing import HostClock
from zero_optim.errors import ZeroOptimError
from zero_optim.stores.direct_file import DirectFile
from zero_optim.stores.disk_homes import PagePlace
from zero_optim.stores.paged_store import PagedStore

CPU_DEVICE = torch.device("cpu")
UPDATE = Update(4096, torch.bfloat16, CPU_DEVICE, Path("nowhere"))
ALONE = OffloadAlone((5.0,), 7, dict.fromkeys(("to_device", "to_host", "read", "written"), 3), {"device": 1}, None)

# -- what a step is held to --------------------------------------------------------------------------------------------


def test_hidden_is_what_does_not_make_the_step_longer():
    none, copies, disk = [10.0, 20.0, 10.0], [4.0, 4.0, 4.0], [6.0, 6.0, 6.0]
    assert hidden([14.0, 24.0, 14.0], none, {"copies": copies}) == 0.0
    assert hidden([11.0, 21.0, 11.0], none, {"copies": copies}) == 0.75
    assert hidden([15.0, 25.0, 99.0], none, {"copies": copies, "disk": disk}) == 0.5, "the median over the rounds"
    assert hidden([9.0, 9.0, 9.0], none, {"copies": copies}) == 1.0
    assert hidden([90.0, 90.0, 90.0], none, {"copies": copies}) == 0.0


def test_a_step_is_held_to_the_longest_of_its_parts():
    none = [10.0, 10.0]
    assert held_to(20.0, none, {"copies": [16.0, 16.0]}) == ("copies", 0.8)
    assert held_to(20.0, none, {"copies": [4.0, 4.0]}) == (NONE, 0.5)
    assert held_to(40.0, none, {"copies": [4.0, 4.0], "disk": [30.0, 30.0]}) == ("disk", 0.75)
    bound, _ = held_to(40.0, none, {"copies": [4.0, 4.0], "update": [8.0, 8.0]})
    assert bound == "update", "its update is the host's, and not None's on the device"


def test_rows():
    laps = {NONE: [2.0] * 3, PAGED: [4.0] * 3, f"{PAGED}/copies": [3.0] * 3}
    step = OffloadContest("step", UPDATE, [NONE, PAGED], 1)
    none, paged = make_rows(step, "bf16", {NONE: ALONE, PAGED: ALONE}, laps)
    assert (none.versus, none.bound, none.fraction, none.hidden, none.beside) == (1.0, None, None, None, {})
    assert (paged.versus, paged.bound, paged.fraction) == (0.5, "copies", 0.75)
    assert paged.hidden == pytest.approx(1 / 3, abs=1e-4) and paged.beside == {"copies": 3.0}
    assert (paged.numel, paged.peak, paged.held) == (4096, 7, {"device": 1})
    _, trained = make_rows(replace(step, part="train"), "bf16", {NONE: ALONE, PAGED: ALONE}, laps)
    assert trained.fraction is None and trained.hidden == paged.hidden, "a whole step is more than these parts"


def test_the_rank_that_needs_most_counts():
    assert offload.most([ALONE, replace(ALONE, results=(6.0,), peak=9)]) == replace(ALONE, results=(5.0, 6.0), peak=9)


def test_a_store_that_computes_something_else_gives_no_figures():
    contest = OffloadContest("train", UPDATE, [NONE, CPU, "deepspeed"], 1)
    other = replace(ALONE, results=(5.0001,))
    offload.check_results(contest, {NONE: ALONE, CPU: ALONE, "deepspeed": other})
    with pytest.raises(ZeroOptimError, match=r"train: cpu gives \(5.0001,\), and None \(5.0,\)"):
        offload.check_results(contest, {NONE: ALONE, CPU: other})
    with pytest.raises(ZeroOptimError, match="deepspeed gives"):
        offload.check_results(contest, {NONE: ALONE, "deepspeed": replace(ALONE, results=(6.0,))})


def test_the_clock_starts_when_all_are_there_and_the_device_is_done(monkeypatch):
    events: list[str] = []
    now = iter(range(100))

    def tick() -> float:
        events.append("clock")
        return float(next(now))

    monkeypatch.setattr(contest, "settle", lambda device: events.append("settle"))
    comm = SimpleNamespace(exchange=lambda token: events.append("meet"))
    clock = contest.TogetherClock(comm, CPU_DEVICE, HostClock(tick))  # type: ignore[arg-type]
    assert clock.time([lambda: events.append("work")])() == [1000.0]
    assert events == ["meet", "settle", "clock", "work", "clock"]


# -- what it is held to ------------------------------------------------------------------------------------------------


def test_the_link_copies_as_many_bytes(monkeypatch):
    link = Link(1000, 300, CPU_DEVICE)
    copied: list[tuple[int, bool]] = []
    slots = {link._arriving.data_ptr(), link._leaving.data_ptr()}
    copy = torch.Tensor.copy_

    def counted(target, source, *args, **kwargs):
        copied.append((target.nbytes, target.data_ptr() in slots))
        return copy(target, source, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "copy_", counted)
    link.move(1000, 500)
    arrived = [nbytes for nbytes, to_slot in copied if to_slot]
    left = [nbytes for nbytes, to_slot in copied if not to_slot]
    assert arrived == [300, 300, 300, 100] and left == [300, 200]


def test_the_disk_moves_as_many_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(offload_links, "BLOCK_BYTES", 8192)
    disk = DiskLink(tmp_path, 5 * 8192)
    moved: dict[str, list[tuple[int, int]]] = {"read": [], "write": []}
    for way in moved:
        real = getattr(DirectFile, way)

        def counted(file, memory, offset, way=way, real=real):
            moved[way].append((offset, len(memory)))
            return real(file, memory, offset)

        monkeypatch.setattr(disk._file, way, counted.__get__(disk._file))
    disk.move(5 * 8192, 0)
    assert sorted(moved["read"]) == [(8192 * n, 8192) for n in range(5)] and not moved["write"]
    moved["read"].clear()
    disk.move(100, 2 * 8192 + 100)
    assert moved["read"] == [(0, 4096)], "rounded up to what a disk takes"
    assert sorted(moved["write"]) == [(8192 * n, 8192 if n < 4 else 4096) for n in (2, 3, 4)]
    assert BLOCK_BYTES % 4096 == 0 and not list(tmp_path.iterdir()), "its file has no name"


def test_a_step_is_over_when_its_pages_are_on_the_disk(tmp_path, monkeypatch):
    parameters = [torch.nn.Parameter(torch.ones(2**16)) for _ in range(2)]
    opt = ShardedAdamW(parameters, state_offload=f"nvme:{tmp_path}", bucket_cap_mb=0.25)
    store = opt.engine.store
    assert isinstance(store, PagedStore)
    may_write, write = Event(), DirectFile.write

    def held(file, memory, offset):
        assert may_write.wait(60)
        write(file, memory, offset)

    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    opt.step()
    store.wait()
    monkeypatch.setattr(DirectFile, "write", held)
    opt.step()
    places = [home.place for home in store._homes._homes]  # type: ignore[attr-defined]
    assert PagePlace.WRITING in places
    may_write.set()
    store.wait()
    assert {home.place for home in store._homes._homes} == {PagePlace.ON_DISK}  # type: ignore[attr-defined]
    opt.close()


# -- who is in it ------------------------------------------------------------------------------------------------------


def test_who_has_something_to_do():
    task = train_step.make_task(2**16, "bf16", 64, CPU_DEVICE)
    training = Training(task, Path("nowhere"), 2**16)

    def field(work, ranks):
        return [*offload_contenders.field(work, NAMES, ranks)]

    assert WAITING not in field(UPDATE, 1) and "torchao" in field(UPDATE, 1)
    assert WAITING in field(training, 2) and "torchao" not in field(training, 2)
    assert WAITING not in field(training, 1), "one rank never speculates"
    assert [*offload_contenders.field(training, ("nvme",), 2)] == [NONE, NVME]
    assert offload_contenders.why_missing("torchao", CPU_DEVICE, torch.bfloat16) == "not run here: needs CUDA"
    assert offload_contenders.why_missing(CPU, CPU_DEVICE, torch.float32) is None


def test_smaller_state_moves_half_the_bytes(tmp_path):
    moved, work = {}, replace(UPDATE, numel=2**21, folder=tmp_path)  # so scales of a page have no gap
    for name in (PAGED, SMALL_PAGED):
        made = offload_contenders.update_ours(work, name)
        before = made.account()["to_device"]
        for part in made.job:
            part()
        moved[name] = made.account()["to_device"] - before
    assert moved[PAGED] == 12 * work.numel
    assert moved[SMALL_PAGED] == (2 + 1 + 1) * work.numel + 2 * 4 * work.numel // 128


def test_the_update_is_adamw_s(tmp_path):
    work = replace(UPDATE, dtype=torch.float32, folder=tmp_path)
    reference = [torch.nn.Parameter(values) for values in work.tensors(0)]
    for parameter, gradient in zip(reference, work.gradients(), strict=True):
        parameter.grad = gradient
    plain = torch.optim.AdamW(reference, **offload_contenders.TRAINING)
    made = offload_contenders.update_ours(work, PAGED)
    for _ in range(3):
        plain.step()
        made.job[0]()
    expected = sum(parameter.detach().double().sum() for parameter in reference)
    assert made.result() == pytest.approx(float(expected), rel=1e-6)


# -- a whole run -------------------------------------------------------------------------------------------------------


def test_a_run_leaves_a_file_and_a_plot_that_is_drawn_again(bench, draws_again, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(offload, "on_ranks", lambda count, work, *args, device: run_ranks(count, call, work, args))
    first = bench(
        *("offload", "--numel", "128Ki", "--rounds", "1", "--device", "cpu", "--out", "."),
        *("--contenders", PAGED, CPU, WAITING, NVME, "torchao"),
    )
    assert first.code == 0, first.err
    (file,) = Path().glob("*-offload.json")
    (plot,) = Path().glob("*-offload.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
    record = json.loads(file.read_text())
    assert record["baselines"] == {"torchao": "not run here: needs CUDA"}
    rows = {(row["part"], row["backend"]): row for row in record["rows"]}
    assert [*rows] == [
        *(("step", name) for name in (NONE, PAGED, CPU, NVME)),
        *(("train", name) for name in (NONE, PAGED, CPU, WAITING, NVME)),
    ]
    state, half = 12 * 2**17, 2 * 2**17
    nothing = dict.fromkeys(("to_device", "to_host", "read", "written"), 0)
    assert rows["step", NONE]["moved"] == nothing and rows["step", NONE]["held"]["device"] == state
    assert rows["step", PAGED]["moved"] == {**nothing, "to_device": state, "to_host": state}
    assert rows["step", PAGED]["held"] == {"device": 2 * state // 32, "host": state, "disk": 0}
    assert rows["step", CPU]["moved"] == {**nothing, "to_device": half, "to_host": half}
    assert rows["step", NVME]["moved"] == dict.fromkeys(nothing, state)
    assert rows["step", NVME]["held"] == {"device": 2 * state // 32, "host": 6 * state // 32, "disk": state}
    assert set(rows["step", NVME]["beside"]) == {"copies", "disk"}
    assert rows["train", CPU]["speculated"]["right"] > 0 == rows["train", CPU]["speculated"]["redone"]
    assert rows["train", WAITING]["speculated"] is None
    for row in rows.values():
        assert row["time"][1] <= row["time"][0] <= row["time"][2]
        longest = max([rows["step", NONE]["time"][0]] * (row["part"] == "step") + [*row["beside"].values()], default=0)
        if row["fraction"] is not None:
            assert row["fraction"] == pytest.approx(longest / row["time"][0], abs=1e-3)
    assert all(len(line) <= WIDTH for line in first.out.splitlines())
    draws_again(first, file, plot)


def test_the_file_is_held_to_the_disk(run_here, draws_again):
    first = run_here(bench_pages.main)("--numel", "128Ki", "--rounds", "1", "--out", ".")
    assert first.code == 0, first.err
    (file,) = Path().glob("*-pages.json")
    rows = {row["backend"]: row for row in json.loads(file.read_text())["rows"]}
    assert [*rows] == ["pages write", "pages read", "pages both"]
    state = 12 * 2**17
    assert rows["pages read"]["moved"] == {"to_device": 0, "to_host": 0, "read": state, "written": 0}
    for row in rows.values():
        assert row["fraction"] == pytest.approx(row["beside"]["disk"] / row["time"][0], abs=1e-3)
    draws_again(first, file, file.with_suffix(".png"))


def test_a_sleep_is_held_to_a_copy(run_here, draws_again):
    first = run_here(bench_sleep.main)("--numel", "1Mi", "--rounds", "1", "--out", ".")
    assert first.code == 0, first.err
    assert "no GPU: all copies are from memory to memory" in first.err + first.out
    (file,) = Path().glob("*-sleep.json")
    rows = {row["backend"]: row for row in json.loads(file.read_text())["rows"]}
    assert [*rows] == ["sleep, state", "wake, state", "sleep, all", "wake, all"]
    state, parameters = 12 * 2**20, 2 * 2**20
    assert rows["sleep, state"]["moved"] == {"to_device": 0, "to_host": state, "read": 0, "written": 0}
    assert rows["wake, all"]["moved"]["to_device"] == state + parameters
    for name, row in rows.items():
        assert row["fraction"] == pytest.approx(row["beside"]["copy"] / row["time"][0], abs=1e-3)
        assert row["freed"] > 0.99
        kept = 0 if name.endswith("all") else parameters
        assert kept <= row["held"]["device"] < kept + 0.01 * state
    draws_again(first, file, file.with_suffix(".png"))


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["offload", "--contenders", "ddp"], ["--contenders ddp", PAGED, "torchao"]),
        (["offload", "--dtypes", "fp32"], ["--dtypes fp32", "bf16"]),
        (["offload", "--ranks", "2", "4"], ["--ranks", "one number of them"]),
        (["offload", "--tokens", "64"], ["--tokens", "offload does not take it"]),
    ],
    ids=" ".join,
)
def test_bad_arguments(refuses, arguments, parts):
    refuses(*arguments, "--out", "results", saying=parts)
