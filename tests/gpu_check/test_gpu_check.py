"""`make gpu-check`, rehearsed on the CPU: all phases end, failures and hangs are told, what was measured is kept."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import bench_convergence
import gpu_build
import gpu_check
import gpu_nccl
import gpu_phases
import gpu_profile
import gpu_trainer
import pytest
import torch
import warm_python
from cells import slow
from gpu_check import Log, run_phase
from gpu_phases import PARTS, Phase
from gpu_results import SKIP_CODE, Outcome, Results, Verdict, reports, verdict
from gpu_trainer import Run, compare
from zero_optim.bench.request import OPS

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def check(folder: Path, phases: list[Phase], seconds: float = 60.0) -> int:
    """Each phase is a group of its own."""
    results = Results(torch.device("cpu"), folder, "gpu-test")
    return gpu_check.check([[phase] for phase in phases], results, Log(folder / "log"), seconds)


def phases_of(parts: Iterable[str], *, rehearse: bool = False, nccl: Path | None = None) -> dict[str, Phase]:
    scratch = Path("scratch")
    groups = [group for part in parts for group in gpu_phases.groups_of(part, scratch, rehearse=rehearse, nccl=nccl)]
    return {phase.name: phase for group in groups for phase in group}


def read_record(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text())


# ---- the whole -------------------------------------------------------------------------------------------------------


FEW = ("build", "bench_adam_step", "profile", "test_large", "nccl_two_ranks", "bench_step", "bench_sleep")
REHEARSED = ("build", "bench_adam_step", "profile", "test_large", "nccl_two_ranks", "test_each_collective")
REHEARSED += ("test_nccl_ranks", "test_work_order", "memory", "stages", "trainer", "bench_step", "bench_offload")
REHEARSED += ("bench_sleep", "test_symmetric_product", "products")
"""In the order in which they run. The tests of the other phases take longer, and need no process of their own."""
ALL = pytest.param(REHEARSED, marks=slow, id="all")
"""``test_gpu_memory.py``, ``bench/test_bench_offload.py``, ``simulated_gpu/test_order_programs.py`` and
``triton_backend/test_symmetric.py`` see most of what these would."""

Rehearsal = tuple[Path, subprocess.CompletedProcess[str], tuple[str, ...]]


@pytest.fixture(scope="module", params=[pytest.param(FEW, id="few"), ALL])
def rehearsal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """By the make target, with $OUT, in an environment that must not matter to the phases. Of the order programs it
    takes few: two of each kind are in ``make race-check``."""
    folder = tmp_path_factory.mktemp("out")
    arguments = f"ARGS=--rehearse --only {' '.join(request.param)}"
    command = ["make", "-C", str(ROOT), "gpu-check", f"PYTHON={warm_python.executable()}", arguments]
    environment = {**os.environ, "OUT": str(folder), "RANK": "3", "WORLD_SIZE": "7", "ZERO_KERNELS_BACKEND": "abacus"}
    environment["ZERO_KERNELS_ORDER_PROGRAMS"] = "few"
    for name in ("PYTHONPATH", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"):  # of a make that runs this test
        environment.pop(name, None)
    return folder, subprocess.run(command, env=environment, capture_output=True, text=True), request.param


def test_phases_are_rehearsed(rehearsal: Rehearsal) -> None:
    folder, done, phases = rehearsal
    assert done.returncode == 0, done.stdout + done.stderr
    record = read_record(folder)
    assert tuple(phase["phase"] for phase in record["phases"]) == phases
    assert [phase["result"] for phase in record["phases"]] == [Verdict.OK.value] * len(phases)
    assert all(f"\n{name} {Verdict.OK.value}, " in done.stdout for name in phases)
    assert "nccl_two_ranks| two ranks have each other's sums\n" in done.stdout, "its lines are shown as they come"
    assert {row["op"] for row in record["rows"]} == {"adam_step", "step", "train_step", "offload"}


@pytest.mark.parametrize("rehearsal", [ALL], indirect=True)
def test_what_phases_have_measured_is_kept(rehearsal: Rehearsal) -> None:
    record = read_record(rehearsal[0])
    assert [share["stage"] for share in record["memory"]["stages"]] == [1, 2, 3]
    assert len(record["stages"]["ways"]) == 5 and record["stages"]["problems"] == []
    assert [of["shape"] for of in record["products"]["shapes"]] == [[1, 32, 32], [2, 20, 50]]
    (trained,) = record["trainer"]["runs"]
    assert trained["run"] == {"device": "cpu", "dtype": "bf16", "stage": 0} and trained["problem"] is None
    assert trained["steps"] == 3 and trained["difference"] == 0.0  # stages 0 and 2 on one rank are the same arithmetic


@pytest.mark.parametrize("rehearsal", [ALL], indirect=True)
def test_the_programs_are_rehearsed_on_ranks(rehearsal: Rehearsal) -> None:
    """None of them is skipped but the one that shows that torch's sanitizer is at work."""
    phases = {phase["phase"]: phase for phase in read_record(rehearsal[0])["phases"]}
    assert phases["test_nccl_ranks"]["skipped"] == [] and "passed" in phases["test_nccl_ranks"]["note"]
    assert phases["test_work_order"]["skipped"] == ["there are no streams on cpu"]
    assert "    skipped: there are no streams on cpu\n" in rehearsal[1].stdout


def test_its_files_are_few_and_flat(rehearsal: Rehearsal) -> None:
    folder, done, _ = rehearsal
    (record,) = folder.glob("*.json")
    assert record.stem.endswith("-gpu-some")
    plots = {record.with_suffix(".png").name, f"{record.stem}-offload.png"}
    drawn = plots if importlib.util.find_spec("matplotlib") else set()
    assert {path.name for path in folder.iterdir()} == {record.name, "gpu-check-some.log"} | drawn
    log = (folder / "gpu-check-some.log").read_text()
    assert all(f"{phase['phase']} ... (at most" in log for phase in read_record(folder)["phases"])
    assert str(record) in done.stdout.splitlines()


# ---- the parts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", PARTS)
def test_a_part_ends_within_its_time(part: str) -> None:
    """With what is left for the plot and the table, whatever its phases do."""
    groups = gpu_phases.groups_of(part, Path("scratch"), rehearse=False)
    assert gpu_phases.seconds_of(groups) + gpu_phases.KEPT <= gpu_phases.SECONDS == 530
    assert all(group for group in groups)


def test_the_parts_cover_all_tests_and_no_phase_is_in_two() -> None:
    names = [name for part in PARTS for name in phases_of(part)]
    assert len(names) == len(set(names)) and names[0] == "build"
    given = {word for phase in phases_of(PARTS).values() for word in phase.command}
    assert {str(path) for path in (ROOT / "tests/gpu").glob("test_*.py")} <= given
    assert {"trainer", "memory", "stages", "profile", "products", "convergence", "nccl_two_ranks"} <= set(names)
    assert {f"bench_{op}" for op in (*OPS, "step", "sleep")} <= set(names)


def test_curves_have_flags_that_their_script_knows() -> None:
    given = bench_convergence.parse(phases_of("e")["convergence"].command[2:])
    assert (given.device, given.ranks, given.at_once, given.compare) == ("cuda", 1, 8, "forms")


def test_figures_come_first() -> None:
    """Whatever happens to the rest: a first call that ends early has some."""
    names = [name for name in phases_of("a") if not name.startswith("smoke_triton")]
    assert names[:4] == ["build", "smoke_cuda", "bench_adam_step", "bench_pack"]
    command = phases_of("a")["bench_adam_step"].command
    assert "2^20" in command and "2^30" in command and [*command][command.index("--dtypes") + 1] == "bf16"


def test_tests_of_several_ranks_are_where_they_can_share_the_gpu() -> None:
    for name in ("test_optimizer", "test_units"):
        command = [*phases_of("b")[name].command]
        assert "gpu and not ranks" in command
    alone = {"nccl_two_ranks", "test_each_collective"}
    assert {name: phase.after for name, phase in phases_of("c").items()} == {
        name: None if name in alone else "nccl_two_ranks" for name in phases_of("c")
    }


def test_what_several_processes_share_is_all_of_it(tmp_path: Path) -> None:
    """Of a file of tests, each is in one of the parts."""
    (tmp_path / "test_some.py").write_text("import pytest\n@pytest.mark.parametrize('n', range(7))\ndef test(n): ...\n")
    shutil.copy(ROOT / "tests/gpu/conftest.py", tmp_path)
    (tmp_path / "places.py").write_text("SEED = 1\ndef why_no_device(): return None\n")
    ran = []
    for number in range(1, 4):
        environment = {**os.environ, "ZERO_KERNELS_GPU_TESTS_PART": f"{number}/3", "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
        ran.append({line for line in done.stdout.splitlines() if "::" in line})
    assert [len(some) for some in ran] == [3, 2, 2] and len(set.union(*ran)) == 7


def test_programs_run_again_under_the_sanitizer_and_in_one_queue() -> None:
    phases = phases_of(PARTS)
    sanitized, one_queue = ([f"order_{how}_{part}" for part in range(1, 6)] for how in ("sanitized", "one_queue"))
    of_ranks = [f"nccl_{how}_{part}" for how in ("one_queue", "sanitized") for part in (1, 2)]
    again = {**dict.fromkeys((*sanitized, *one_queue), "test_work_order"), **dict.fromkeys(of_ranks, "test_nccl_ranks")}
    for name, tests in again.items():
        assert str(ROOT / "tests/gpu" / f"{tests}.py") in phases[name].command
    assert {name for name, phase in phases.items() if "TORCH_CUDA_SANITIZER" in phase.environment} == {
        *sanitized,
        *one_queue,
        *of_ranks[2:],
    }
    assert {name for name, phase in phases.items() if "CUDA_DEVICE_MAX_CONNECTIONS" in phase.environment} == {
        *one_queue,
        *of_ranks[:2],
    }


def test_no_phase_takes_over_the_sanitizer_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_CUDA_SANITIZER", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert not {"TORCH_CUDA_SANITIZER", "CUDA_DEVICE_MAX_CONNECTIONS"} & gpu_check.environment({}).keys()
    assert gpu_check.environment(gpu_phases.SANITIZER)["TORCH_CUDA_SANITIZER"] == "1"


def test_the_build_finds_what_it_calls_in_setup_py() -> None:
    setup = gpu_build.load_setup()
    assert callable(setup.build_all) and callable(setup.install)


def test_without_a_device_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("gpu-check: ") and said.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


# ---- which NCCL ------------------------------------------------------------------------------------------------------

OLD, NEW = 22807, 23004


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By version: files that answer as NCCL does when it is asked for it."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    made = {}
    for version in (OLD, NEW):
        folder = tmp_path_factory.mktemp(f"nccl-{version}")
        source, made[version] = folder / "nccl.c", folder / gpu_nccl.SONAME
        source.write_text(f"int ncclGetVersion(int* version) {{ *version = {version}; return 0; }}")
        soname = f"-Wl,-soname,{gpu_nccl.SONAME}"
        subprocess.run([compiler, "-shared", "-fPIC", soname, "-o", made[version], source], check=True)
    return made


@pytest.mark.parametrize(
    ("code", "version"), [(OLD, (2, 28, 7)), (NEW, (2, 30, 4)), (21000, (2, 10, 0)), (2804, (2, 8, 4))]
)
def test_the_version_of_an_nccl(code: int, version: tuple[int, ...]) -> None:
    assert gpu_nccl.parse(code) == version


def test_why_ranks_cant_share_a_gpu() -> None:
    assert gpu_nccl.why_not_shared(2, 2, (2, 28, 7)) is None, "a GPU each"
    assert gpu_nccl.why_not_shared(4, 1, (2, 30, 4)) is None, "one for all"
    assert gpu_nccl.why_not_shared(4, 1, (2, 30)) is None
    reason = str(gpu_nccl.why_not_shared(2, 1, (2, 28, 7)))
    assert "2 ranks, one GPU, and NCCL 2.28.7 takes one rank a GPU" in reason
    assert "--nccl PATH" in reason and "nvidia-nccl-cu13>=2.30" in reason
    assert "4 ranks, 2 GPUs" in str(gpu_nccl.why_not_shared(4, 2, (2, 28, 7)))


ASKED_ON_A_GPU = """
import torch
torch.cuda.device_count = lambda: 1
torch.cuda.nccl.version = lambda: (2, 28, 9)  # of the headers that torch was compiled with
import places
print(places.why_not_nccl_ranks(2))
"""


def test_tests_ask_the_nccl_that_is_preloaded(libraries: dict[int, Path]) -> None:
    """Not the headers that torch was compiled with, which stay the same."""
    tests = ROOT / "tests"
    folders = [tests / "gpu", tests / "kernels", BENCHMARKS, ROOT, ROOT / "python"]
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders)), "ZERO_KERNELS_GPU_TESTS_ON": "cuda"}

    def asked(library: Path) -> str:
        environment = {**base, "LD_PRELOAD": str(library)}
        command = python(ASKED_ON_A_GPU)
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout

    assert "NCCL 2.28.7 takes one rank a GPU" in asked(libraries[OLD])
    assert asked(libraries[NEW]) == "None\n"


def test_the_flag_takes_a_newer_nccl(libraries: dict[int, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is preloaded where tests have several ranks, and nowhere else."""
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    options = gpu_check._parse(["--nccl", str(libraries[NEW])])
    assert options.nccl == libraries[NEW]
    phases = phases_of(PARTS, nccl=options.nccl)
    preloaded = {name for name, phase in phases.items() if phase.environment.get("LD_PRELOAD") == str(libraries[NEW])}
    assert preloaded == {*phases_of("c")} - {"test_each_collective"}
    assert all(phases[name].environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" for name in preloaded)
    assert not any("LD_PRELOAD" in phase.environment for phase in phases_of(PARTS).values())


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        gpu_check.main(["--nccl", str(path)])
    assert left.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_the_flag_refuses_what_is_no_newer_nccl(
    libraries: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "argument --nccl: " in (said := refusal(tmp_path / "absent", capsys)) and "is not a file" in said
    text = tmp_path / "text.so"
    text.write_text("no library")
    assert "argument --nccl: " in (said := refusal(text, capsys)) and "is no NCCL library" in said
    assert "argument --nccl: " in (said := refusal(libraries[OLD], capsys)) and "is NCCL 2.28.7" in said
    parted = tmp_path / "in two words"
    parted.write_text("")
    assert "argument --nccl: " in (said := refusal(parted, capsys)) and "LD_PRELOAD" in said


# ---- phases that go wrong --------------------------------------------------------------------------------------------


def test_a_failing_phase_is_told_and_the_others_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = Phase("bad", python("print('before'); raise SystemExit('the culprit')"), 30)
    assert check(tmp_path, [bad, Phase("good", python("print('fine')"), 30)]) == 1
    outcomes = {phase["phase"]: (phase["result"], phase["note"]) for phase in read_record(tmp_path)["phases"]}
    assert outcomes == {"bad": (Verdict.FAILED.value, "the culprit"), "good": (Verdict.OK.value, "fine")}
    assert "    before\n    the culprit\n" in capsys.readouterr().out


SKIPS = """
print("SKIPPED [2] tests/gpu/test_nccl_ranks.py:50: one GPU, and an old NCCL: take another")
print("SKIPPED [1] tests/gpu/test_nccl_ranks.py:61: one GPU, and an old NCCL: take another")
print("3 skipped in 0.1s")
"""


def test_why_tests_were_skipped_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, [Phase("skips", python(SKIPS), 30)]) == 0
    (phase,) = read_record(tmp_path)["phases"]
    assert phase["skipped"] == ["one GPU, and an old NCCL: take another"] and phase["note"] == "3 skipped in 0.1s"
    assert capsys.readouterr().out.count("    skipped: one GPU, and an old NCCL: take another\n") == 1


HANGS = """
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
for ignored in (signal.SIGINT, signal.SIGTERM):
    signal.signal(ignored, signal.SIG_IGN)
print(child.pid, flush=True)
signal.pause()
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux: descendants are found in /proc")
def test_a_phase_that_hangs_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it ignores the request to end, and its child has a session of its own, as the ranks of a training have."""
    monkeypatch.setattr(gpu_check, "GRACE", 0.1)
    outcome = run_phase(Phase("hangs", python(HANGS), 30), 3.0, Log(tmp_path / "log"))
    assert outcome.result == Verdict.TIMED_OUT
    assert has_ended(int(outcome.note))


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux: descendants are found in /proc")
def test_ctrl_c_ends_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The phases of a group run in threads, which no signal reaches."""
    monkeypatch.setattr(gpu_check, "GRACE", 0.1)
    monkeypatch.setattr(gpu_check, "LOOK", 0.05)
    log = Log(tmp_path / "log")

    class Interrupted(Results):
        sent = False

        def look(self, phase: Phase) -> None:
            if not self.sent and children():
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)

    def children() -> list[int]:
        return [int(pid) for pid in re.findall(r"^hangs\| (\d+)$", log.path.read_text(), re.MULTILINE)]

    results = Interrupted(torch.device("cpu"), tmp_path, "gpu-test")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            gpu_check.run_group([Phase("hangs", python(HANGS), 60)], 60.0, log, results)
    finally:
        signal.signal(signal.SIGINT, before)
    assert has_ended(*children())


def has_ended(pid: int) -> bool:
    """Whether a process that is no child of this one ends within the time that a kill may take."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    return bool(select.select([process], [], [], 10)[0])


def test_without_time_phases_are_not_run_and_the_record_is_written(tmp_path: Path) -> None:
    assert check(tmp_path, [Phase("late", python("print('fine')"), 30)], seconds=0.0) == 1
    (phase,) = read_record(tmp_path)["phases"]
    assert phase["result"] == Verdict.NOT_RUN.value and phase["seconds"] == 0.0


ROW = {"op": "pack", "backend": "cuda", "dtype": "bf16", "numel": 2**20, "fraction": 0.9, "vs_torch": 2.0}
GIVEN = json.dumps({"rows": [{**ROW, "yardstick": "copy"}], "baselines": {"te": "not installed"}})


def test_rows_of_a_phase_that_then_fails_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "scratch"
    write = f"from pathlib import Path; Path({str(folder)!r}, 'a.json').write_text({GIVEN!r}); raise SystemExit(3)"
    results = Results(torch.device("cpu"), tmp_path, "gpu-test")
    phase = Phase("bench_pack", python(write), 30, folder=folder)
    outcome = results.take(phase, run_phase(phase, 30, Log(tmp_path / "log")))
    assert outcome.result == Verdict.FAILED and outcome.note == "bf16, 1 Mi, of copy (vs torch): cuda 0.90 (2.00x)"
    assert len(read_record(tmp_path)["rows"]) == 1
    (folder / "a.json").write_text('{"rows": [')  # ended while it wrote
    assert results.take(phase, Outcome("bench_pack", Verdict.TIMED_OUT, 1.0, "ended")).result == Verdict.TIMED_OUT
    assert len(read_record(tmp_path)["rows"]) == 1, "what was whole before"


def test_rows_are_on_disk_while_the_phase_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends the run from without loses nothing that was measured."""
    monkeypatch.setattr(gpu_check, "LOOK", 0.05)
    folder = tmp_path / "scratch"
    os.mkfifo(go_on := tmp_path / "go on")  # what the phase waits for: its row is in the record
    write = (
        f"from pathlib import Path; Path({str(folder)!r}, 'a.json').write_text({GIVEN!r}); open({str(go_on)!r}).read()"
    )
    results, seen = Results(torch.device("cpu"), tmp_path, "gpu-test"), []

    def look() -> None:
        results.look(phase)
        if not seen and (written := [*tmp_path.glob("*.json")]) and json.loads(written[0].read_text())["rows"]:
            seen.append(json.loads(written[0].read_text())["rows"][0]["backend"])
            go_on.write_text("now")

    phase = Phase("bench_pack", python(write), 30, folder=folder)
    assert run_phase(phase, 30, Log(tmp_path / "log"), look).result == Verdict.OK
    assert seen == ["cuda"] and read_record(tmp_path)["phases"] == []


# ---- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "last", "result"),
    [
        (0, "3 passed in 0.1s", Verdict.OK),
        (0, "3 passed, 2 skipped in 0.1s", Verdict.OK),
        (0, "3 skipped in 0.1s", Verdict.SKIPPED),
        (0, "3 skipped, 4 deselected in 0.1s", Verdict.SKIPPED),
        (5, "1 skipped in 0.1s", Verdict.SKIPPED),  # a module that pytest.importorskip has left out
        (5, "7 deselected in 0.1s", Verdict.FAILED),
        (1, "1 failed, 2 skipped in 0.1s", Verdict.FAILED),
        (SKIP_CODE, "ncu is not on the PATH", Verdict.SKIPPED),
        (0, "two ranks have each other's sums", Verdict.OK),
        (None, "3 skipped in 0.1s", Verdict.TIMED_OUT),
    ],
)
def test_tests_that_were_all_skipped_are_not_ok(code: int | None, last: str, result: Verdict) -> None:
    assert verdict(code, ["something", last]) == result


def test_a_skipped_phase_fails_nothing_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What needs it is left out with it; what needs one that failed is not run."""
    skips = Phase("first", python(f"print('no such GPU'); raise SystemExit({SKIP_CODE})"), 30)
    assert check(tmp_path, [skips, Phase("second", python("print('fine')"), 30, after="first")]) == 0
    said = capsys.readouterr().out
    assert "first skipped, " in said and "second skipped, 0.0 s: first skipped" in said
    fails = Phase("first", python("raise SystemExit(1)"), 30)
    (tmp_path / "again").mkdir()
    assert check(tmp_path / "again", [fails, Phase("second", python("print('fine')"), 30, after="first")]) == 1
    assert "second not run, 0.0 s: first failed" in capsys.readouterr().out


def test_what_was_never_calibrated_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = ["  /a/test_units.py:3: Uncalibrated: 5 bytes more", "Uncalibrated: 3% of the plan", "1 passed"]
    assert reports(said) == ["5 bytes more", "3% of the plan"]
    assert check(tmp_path, [Phase("measures", python("print('Uncalibrated: 3% off')"), 30)]) == 0
    (phase,) = read_record(tmp_path)["phases"]
    assert phase["result"] == Verdict.OK.value and phase["reported"] == ["3% off"]
    assert "    reported, as no GPU has been measured for it: 3% off\n" in capsys.readouterr().out


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_tolerance_that_is_a_guess_fails_on_a_cpu_alone(device: str) -> None:
    tests = ROOT / "tests"
    paths = [tests / "gpu", tests / "kernels", BENCHMARKS, ROOT, ROOT / "python"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), "ZERO_KERNELS_GPU_TESTS_ON": device}
    code = "import places; places.within(True, 'right'); places.within(1 > 2, 'one is less'); print('went on')"
    command = [warm_python.executable(), "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if device == "cuda":
        assert done.stdout == "went on\n" and "Uncalibrated: one is less" in done.stderr and "right" not in done.stderr
    else:
        assert done.stdout == "" and "AssertionError: one is less" in done.stderr


def test_phases_of_a_group_run_at_the_same_time(tmp_path: Path) -> None:
    """Each waits for what the other has written."""
    for name in ("one", "two"):
        os.mkfifo(tmp_path / name)
    give = "import threading; t = threading.Thread(target=lambda: open({!r}, 'w').write('here')); t.start(); "
    give += "print(open({!r}).read()); t.join()"
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    group = [Phase("a", python(give.format(one, two)), 30), Phase("b", python(give.format(two, one)), 30)]
    results = Results(torch.device("cpu"), tmp_path, "gpu-test")
    assert gpu_check.check([group], results, Log(tmp_path / "log"), 60) == 0
    assert [phase["note"] for phase in results.record["phases"]] == ["here", "here"]


def test_a_wheel_is_unpacked_for_the_phases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "some-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("of_the_wheel.py", "VALUE = 5")
    (given,) = gpu_check._parse(["--wheel", str(wheel)]).wheel
    monkeypatch.setattr(gpu_check, "unpacked", [gpu_check._unpack(given, tmp_path / "wheels")])
    phase = Phase("imports", python("import of_the_wheel; print(of_the_wheel.VALUE)"), 30)
    assert run_phase(phase, 30, Log(tmp_path / "log")).note == "5"


# ---- Nsight Compute --------------------------------------------------------------------------------------------------

NCU = """==PROF== Connected to process 7
adam_step cuda: launched
"ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","dram__bytes_write.sum"
"","","ns","byte","byte"
"0","void adam_step_kernel<float>(Args)","1,000","2,000,000","1,000,000"
"""


def test_what_ncu_says_is_read() -> None:
    (kernel,) = gpu_profile.read(NCU.splitlines())
    assert kernel["kernel"] == "void adam_step_kernel<float>"
    assert (kernel["ns"], kernel["bytes_read"], kernel["occupancy_percent"]) == (1000, 2_000_000, None)
    assert gpu_profile.line_of(kernel).startswith("void adam_step_kernel<float>: 1000.0 ns, 3000 GB/s")
    assert gpu_profile.read(["==ERROR== ERR_NVGPUCTRPERM"]) == []


# ---- the trainer's comparison ----------------------------------------------------------------------------------------


def log(*losses: float | None, scale: float = 65536.0) -> list[dict[str, Any]]:
    return [{"loss": loss, "loss_scale": scale} for loss in losses]


GPU = Run("cuda", "bf16", 1)


def test_losses_within_rounding_pass() -> None:
    result = compare(GPU, log(5.0, 4.02), log(5.0, 4.0), 2)
    assert result.problem is None and result.tolerance == 2 * 2**-7
    assert (result.step, result.difference) == (2, pytest.approx(0.005))
    assert "allowed 1.6e-02" in result.line()


@pytest.mark.parametrize(
    ("gpu", "cpu", "problem"),
    [
        (log(5.0, 4.1), log(5.0, 4.0), "beyond rounding"),
        (log(5.0, None), log(5.0, 4.0), "beyond rounding"),
        (log(5.0), log(5.0, 4.0), "1 steps here and 2 on the CPU"),
        (log(5.0, 4.0, scale=1.0), log(5.0, 4.0), "loss scale"),
        ("exit code 1: out of memory", log(5.0, 4.0), "out of memory"),
        (log(5.0, 4.0), "exit code 1: no text", "no run on the CPU: exit code 1"),
    ],
)
def test_what_is_not_the_cpus_training_is_told(gpu: Any, cpu: Any, problem: str) -> None:
    result = compare(GPU, gpu, cpu, 2)
    assert problem in str(result.problem) and problem in result.line()


def test_a_training_elsewhere_than_asked_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU run that fell back to the CPU would have the CPU's losses to the bit."""
    said = subprocess.CompletedProcess([], 0, "ranks  1 on cpu (gloo, 2 threads), stage 1\n")
    monkeypatch.setattr(gpu_trainer.subprocess, "run", lambda *_, **__: said)
    assert "did not run on cuda under nccl" in str(gpu_trainer.train(GPU, [], tmp_path))


def test_losses_beyond_rounding_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so does what is no training."""
    of_gpu: Any = log(5.0, 4.2)
    monkeypatch.setattr(gpu_trainer, "train", lambda run, *_: of_gpu if run.device == "cuda" else log(5.0, 4.0))
    flags = ["gpu_trainer.py", "--steps", "2", "--stages", "1", "--dtypes", "bf16", "--out", str(tmp_path / "t.json")]
    monkeypatch.setattr(sys, "argv", flags)
    assert gpu_trainer.main() == 1
    assert "0 of 1 trainings gave the CPU's losses" in capsys.readouterr().out
    of_gpu = log(5.0, 4.0)
    assert gpu_trainer.main() == 0
    of_gpu = "exit code 1: out of memory"
    assert gpu_trainer.main() == 1
