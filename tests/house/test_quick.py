"""`make quick`: which tests a change has, which of them there is room for, and what git says has changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import quick


def _folders(*paths: str) -> set[str]:
    """Whole folders by their name, and files of tests."""
    files = set(quick.tests_of(paths))
    found = set()
    for folder in {file.partition("/")[0] for file in files}:
        of_folder = {f"{folder}/{path.name}" for path in (quick.TESTS / folder).glob("test_*.py")}
        found |= {folder} if of_folder <= files else of_folder & files
    return found


HOUSE = {"house/test_imports.py", "house/test_contributing.py"}
IMPORTERS = {
    f"{name}.py"
    for name in ("params/test_memory_formats", "clients/test_channels_last_client", "checkpoint/test_channels_last")
}


@pytest.mark.parametrize(
    ("path", "folders"),
    [
        ("python/zero_optim/grads/slots.py", {"grads", "face/test_parity.py", *HOUSE}),
        ("python/zero_optim/checkpoint/loading.py", {"checkpoint", *HOUSE}),
        ("python/zero_optim/units/unit.py", {"units", *HOUSE}),
        ("python/zero_optim/bench/rows/op.py", {"bench", *HOUSE}),
        ("python/zero_optim/report/page.js", {"report", *HOUSE}),
        ("python/zero_optim/integrations/lightning.py", {"clients", *HOUSE}),
        ("python/zero_optim/optimizer.py", {"face", *HOUSE}),
        ("python/zero_optim/engine.py", {"face", "step", *HOUSE}),
        ("python/zero_optim/doctor.py", {"face", "train/test_doctor.py", *HOUSE}),
        ("zero_kernels/reference.py", {"kernels"}),
        ("zero_kernels/triton/pack.py", {"kernels", "triton_backend"}),
        ("csrc/cuda/pack.cu", {"kernels", "cuda"}),
        ("benchmarks/gpu_phases.py", {"gpu_check"}),
        ("benchmarks/bench_training.py", {"bench"}),
        ("docs/step.md", {"house"}),
        ("docs/moving.md", {"clients/test_moving.py"}),
        ("README.md", {"house"}),
        ("tests/grads/test_slots_cells.py", {"grads/test_slots_cells.py"}),
        ("tests/grads/test_that_was_removed.py", {"house"}),
        ("tests/checkpoint/victim.py", {"checkpoint"}),
        ("tests/memory_formats.py", IMPORTERS),
    ],
)
def test_the_tests_of_a_path(path: str, folders: set[str]) -> None:
    assert _folders(path) == folders


def test_every_room_has_tests() -> None:
    """In the folder of its name, or by the table."""
    rooms = [path.parent for path in (quick.ROOT / "python/zero_optim").glob("*/__init__.py")]
    for room in rooms:
        path = f"{room.relative_to(quick.ROOT).as_posix()}/file.py"
        assert set(quick.tests_of([path])) - HOUSE, path


def test_every_name_in_the_table_is_there() -> None:
    for _, names in quick.MORE:
        for name in names:
            assert quick._files(quick.TESTS / name), name


def test_every_measured_file_is_there() -> None:
    assert [name for name in quick.seconds() if not (quick.TESTS / name).exists()] == []


def test_what_was_changed_comes_first_then_what_has_its_name_then_the_quickest() -> None:
    """120 seconds of two workers, and 60 of one, are what there is."""
    seconds = {"a/test_edited.py": 50.0, "a/test_slots_cells.py": 30.0, "a/test_long.py": 61.0}
    seconds |= {"a/test_quick.py": 1.0, "a/test_fair.py": 20.0, "a/test_slow.py": 25.0}
    taken, left = quick.choose(seconds, ["tests/a/test_edited.py", "python/zero_optim/a/slots.py"], seconds)
    assert taken == ["a/test_edited.py", "a/test_slots_cells.py", "a/test_quick.py", "a/test_fair.py"]
    assert left == ["a/test_slow.py", "a/test_long.py"]
    assert quick.choose(["a/test_new.py"], [], {}) == (["a/test_new.py"], [])


def test_the_times_of_a_run_by_file(tmp_path: Path) -> None:
    cases = [("tests.face.test_parity", 1.5), ("tests.face.test_parity.TestClass", 2.0), ("tests.house.test_quick", 9)]
    rows = "".join(f'<testcase classname="{name}" name="test" time="{time}"/>' for name, time in cases)
    (tmp_path / "run.xml").write_text(f"<testsuites><testsuite>{rows}</testsuite></testsuites>")
    assert list(quick.measured(tmp_path / "run.xml").items()) == [
        ("house/test_quick.py", 9.0),
        ("face/test_parity.py", 3.5),
    ]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a branch that has left main, which has gone on."""

    def git(*words: str) -> None:
        name = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
        subprocess.run(["git", *name, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(file: str) -> None:
        (tmp_path / file).write_text(file)
        git("add", file)
        git("commit", "-m", file)

    monkeypatch.setattr(quick, "ROOT", tmp_path)
    git("init", "--initial-branch=main")
    commit("kept")
    git("checkout", "-b", "branch")
    commit("committed")
    git("checkout", "main")
    commit("of main")
    git("checkout", "branch")
    (tmp_path / ".gitignore").write_text("ignored\n")
    (tmp_path / "ignored").write_text("")
    (tmp_path / "kept").write_text("edited")
    return tmp_path


def test_a_change_is_what_differs_from_where_the_branch_began(checkout: Path) -> None:
    assert quick.changed("main") == [".gitignore", "committed", "kept"]
    assert quick.changed("a branch that is not there") == [".gitignore", "kept"]


@pytest.mark.parametrize("code", [0, 1])
def test_the_last_line_says_what_was_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: int
) -> None:
    """The exit code is pytest's; a word that is not of ``quick`` is for pytest."""
    commands = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(quick, "changed", lambda base: [f"tests/{base}.py", "docs/moving.md"])
    monkeypatch.setattr(quick.subprocess, "run", run)
    monkeypatch.setattr(quick, "seconds", lambda: {"clients/test_moving.py": 1e3})
    assert quick.main(["--base", "house/test_imports", "--durations=3"]) == code
    (command,) = commands
    assert "--durations=3" in command and "-x" in command and command[-1] == str(quick.TESTS / "house/test_imports.py")
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "left out for their time: clients/test_moving.py; `make test` runs all"
