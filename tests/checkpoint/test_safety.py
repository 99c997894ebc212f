"""What is published is whole; damage is named, with file and tensor; and a failure leaves what was there before."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import flip
from checkpoint_files import read_contents
from compare import same
from harness import run_ranks
from small_jobs import Stateful, all_of
from torch import nn
from zero_optim import ShardedAdamW, checkpoint
from zero_optim.checkpoint import saving
from zero_optim.checkpoint.folder import inspect
from zero_optim.errors import CheckpointError, RankMismatchError


def job(seed: int = 0) -> tuple[nn.Module, ShardedAdamW]:
    """[3, 5] and [3], after a step."""
    torch.manual_seed(seed)
    model = nn.Linear(5, 3)
    opt = ShardedAdamW(model.named_parameters())
    step(model, opt)
    return model, opt


def step(model: nn.Module, opt: ShardedAdamW) -> None:
    model(torch.ones(2, 5)).sum().backward()
    opt.step()
    opt.zero_grad()


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    model, opt = job()
    for step in (1, 2):
        checkpoint.save(tmp_path, model, opt, step=step)
    opt.close()
    return tmp_path


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index, and give it the checksum of what it says then."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index)
    contents = json.dumps(index.pop("contents"), separators=(",", ":"))
    head = json.dumps(index | {"crc32c": f"{google_crc32c.value(contents.encode()):08x}"}, separators=(",", ":"))
    path.write_text(f'{head[:-1]},"contents":{contents}}}')


def _place(folder: Path, kind: str, name: str) -> int:
    """Where in rank 0's file a tensor begins."""
    (entry,) = (of for of in read_contents(folder)["tensors"] if (of["kind"], of["name"]) == (kind, name))
    return entry["pieces"][0]["offset"]


def _edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "index.json").read_text()
    assert old in text
    (folder / "index.json").write_text(text.replace(old, new))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a bit of a tensor": (
        lambda folder: flip(folder / "rank-0.safetensors", _place(folder, "exp_avg", "weight") + 7),
        r"rank-0.safetensors is damaged: bytes [\d,]+ to [\d,]+, of the exp_avg of 'weight', have another checksum",
    ),
    "cut off": (
        lambda folder: os.truncate(folder / "rank-0.safetensors", 300),
        r"rank-0.safetensors has 300 bytes, and was written with [\d,]+: it was cut off",
    ),
    "a file is gone": (lambda folder: (folder / "rank-0.safetensors").unlink(), "rank-0.safetensors is missing"),
    "no index": (lambda folder: (folder / "index.json").unlink(), "step-2 holds no checkpoint: index.json is missing"),
    "an empty index": (lambda folder: (folder / "index.json").write_bytes(b""), "index.json is damaged, or no index"),
    "half an index": (
        lambda folder: os.truncate(folder / "index.json", (folder / "index.json").stat().st_size // 2),
        "index.json is damaged: its checksum",
    ),
    "another digit": (lambda folder: _edit(folder, '"lr":0.001', '"lr":0.1'), "index.json is damaged: its checksum"),
    "another number": (
        lambda folder: _edit(folder, '"save":{"number":2,', '"save":{"number":1,'),
        "the checksum of its save number is another",
    ),
    "foreign": (
        lambda folder: _edit(folder, '"format":"zero-optim checkpoint"', '"format":"another"'),
        "is not the index of a checkpoint",
    ),
    "a list": (lambda folder: (folder / "index.json").write_text("[1]"), "index.json is damaged, or no index"),
    "another version": (
        lambda folder: _rewrite(folder, lambda index: index.update(version=2)),
        r"has version 2 of the format, and this zero_optim reads version 1: use the zero_optim that wrote it",
    ),
    "a key is missing": (
        lambda folder: _rewrite(folder, lambda index: index["contents"].pop("tensors")),
        "index.json is damaged, or no index: KeyError: 'tensors'",
    ),
    "a field is missing": (
        lambda folder: _rewrite(folder, lambda index: index["contents"]["tensors"][0]["pieces"][0].pop("offset")),
        "index.json is damaged, or no index: TypeError: .*'offset'",
    ),
    "the header of a file": (
        lambda folder: flip(folder / "rank-0.safetensors", 40),
        "rank-0.safetensors is damaged: its header has another checksum",
    ),
    "deep nesting": (lambda folder: (folder / "index.json").write_text("[" * 100_000), "index.json is damaged"),
    "a bit of rank 1": (
        lambda folder: flip(folder / "rank-1.safetensors", -1),
        "rank-1.safetensors is damaged: .* another checksum",
    ),
    "rank 1 is gone": (lambda folder: (folder / "rank-1.safetensors").unlink(), "rank-1.safetensors is missing"),
    "rank 1 has grown": (
        lambda folder: (folder / "rank-1.safetensors").open("ab").write(b"more"),
        "rank-1.safetensors has .* bytes, and was written with",
    ),
    "rank 1 of the checkpoint before": (
        lambda folder: shutil.copy(folder.parent / "step-1" / "rank-1.safetensors", folder),
        "rank-1.safetensors is damaged: .* another checksum",
    ),
}


def load_damaged(rank: int, world_size: int, folder: str, damage: str) -> None:
    """The damaged one is refused, and changes nothing; its folder loads the one before, as long as that is there."""
    (harm, message), path = DAMAGE[damage], Path(folder)
    model, opt = job()
    checkpoint.save(path, model, opt, step=1)
    whole = all_of(model, opt)
    step(model, opt)
    checkpoint.save(path, model, opt, step=2)
    if rank == 0:
        harm(path / "step-2")
    dist.barrier()
    model, opt = job(seed=1)
    before = all_of(model, opt)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path / "step-2", model, opt)
    assert same(all_of(model, opt), before) and not torch.equal(before["weight"], whole["weight"])
    said = pytest.warns(UserWarning, match=rf"step-1 was loaded, and none that is newer: .*{message}")
    with said if rank == 0 else contextlib.nullcontext():
        assert checkpoint.load(path, model, opt).step == 1
    assert same(all_of(model, opt), whole)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path / "step-1")
    dist.barrier()
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(path, model, opt)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_and_the_one_before_is_loaded(tmp_path: Path, damage: str) -> None:
    for ranks in (1, 2)["rank 1" in damage :]:
        run_ranks(ranks, load_damaged, str(tmp_path / f"{ranks}"), damage)


@pytest.mark.slow
def test_every_byte_has_a_checksum(tmp_path: Path) -> None:
    """Of all files, every seventh byte, and every one of an index up to its contents."""
    model, opt = job()
    folder = checkpoint.save(tmp_path, model, opt)
    for file in sorted(folder.iterdir()):
        data = file.read_bytes()
        head = range(data.index(b"contents") if file.name == "index.json" else 0)
        for place in sorted({*head, *range(0, len(data), 7), len(data) - 1}):
            flip(file, place)
            with pytest.raises(CheckpointError, match=file.name):
                checkpoint.load(folder, model, opt)
            file.write_bytes(data)
    assert checkpoint.load(folder, model, opt).step == 1


def test_the_newest_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    """Also after somebody went back to an older one. Where it is damaged the one that was saved before it is taken."""
    model, opt = job()
    for step in (4, 8):
        checkpoint.save(tmp_path, model, opt, step=step)
    checkpoint.load(tmp_path / "step-4", model, opt)
    newest = checkpoint.save(tmp_path, model, opt, step=6)
    assert checkpoint.latest(tmp_path) == newest and checkpoint.load(tmp_path, model, opt).step == 6
    assert "saved: as number 3 in its folder" in inspect(tmp_path, quick=True)[0]
    _edit(newest, '"number":3', '"number":1')
    assert checkpoint.latest(tmp_path) == tmp_path / "step-8"
    with pytest.warns(match="step-8 was loaded, and none that is newer: .*save number"):
        checkpoint.load(tmp_path, model, opt)
    checkpoint.save(tmp_path, model, opt, step=4)  # saved anew
    assert checkpoint.latest(tmp_path) == tmp_path / "step-4"
    checkpoint.save(tmp_path, model, opt, step=5, keep_last=2)  # higher steps, of the branch that was left, stay
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-4", "step-5", "step-6", "step-8"]
    checkpoint.save(tmp_path, model, opt, step=9, keep_last=2)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-5", "step-9"]


def test_latest_is_the_newest_whole_one(two: Path) -> None:
    assert checkpoint.latest(two) == two / "step-2"
    os.truncate(two / "step-2" / "rank-0.safetensors", 10)
    assert checkpoint.latest(two) == two / "step-1"
    assert checkpoint.latest(two / "nothing") is None
    assert checkpoint.info(two).step == 1
    (two / "step-x").mkdir()
    (two / ".writing-step-9").mkdir()
    assert checkpoint.latest(two) == two / "step-1"


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch exploded",)


def test_nothing_is_unpickled(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(two)
    bomb = pickle.dumps(Bomb())
    for name in ("data.pkl", ".metadata", "extra.pt", "rank-1.safetensors", "optimizer.bin", "index.pickle"):
        (two / "step-2" / name).write_bytes(bomb)
        (two / name).write_bytes(bomb)
    model, opt = job(seed=1)
    assert checkpoint.load(two, model, opt).step == 2
    for name in ("rank-0.safetensors", "index.json"):
        (two / "step-2" / name).write_bytes(bomb)
        with pytest.raises(CheckpointError):
            checkpoint.load(two / "step-2", model, opt)
    assert not (two / "exploded").exists()
    pickle.loads(bomb)
    assert (two / "exploded").exists()


def test_keep_last(tmp_path: Path) -> None:
    model, opt = job()
    for step in range(1, 6):
        checkpoint.save(tmp_path, model, opt, step=step)
    os.truncate(tmp_path / "step-4" / "rank-0.safetensors", 10)
    checkpoint.save(tmp_path, model, opt, step=3, keep_last=2)  # the damaged one does not count
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-3", "step-4", "step-5"]
    os.truncate(tmp_path / "step-3" / "rank-0.safetensors", 10)
    checkpoint.save(tmp_path, model, opt, step=8, keep_last=2)  # nor is a whole one lost for it
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["step-3", "step-5", "step-8"]
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="keep_last"):
            checkpoint.save(tmp_path, model, opt, step=8, keep_last=wrong)


def test_without_a_count_of_updates_a_step_is_asked_for(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="nothing here counts updates"):
        checkpoint.save(tmp_path, model)
    with pytest.raises(ValueError, match="nothing here counts updates"):
        checkpoint.save(tmp_path, model, torch.optim.SGD(model.parameters()))


def test_a_replacement_that_fails_loses_nothing(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = job(seed=7)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Any:
        if path.name == ".writing-step-2":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="step-2 could not be published: Input/output error"):
        checkpoint.save(two, model, opt, step=2)
    monkeypatch.undo()
    assert sorted(folder.name for folder in two.iterdir()) == ["step-1", "step-2"]
    # A job that was killed between the two renames: the next puts it back.
    (two / "step-2").rename(two / ".replaced-step-2")
    checkpoint.save(two, model, opt, step=3)
    assert sorted(folder.name for folder in two.iterdir()) == ["step-1", "step-2", "step-3"]
    assert checkpoint.load(two / "step-2", model, opt).step == 2


def test_a_checkpoint_of_the_same_step_is_replaced(two: Path) -> None:
    model, opt = job(seed=5)
    checkpoint.save(two, model, opt, step=2)
    saved = all_of(model, opt)
    model, opt = job(seed=6)
    checkpoint.load(two, model, opt)
    assert same(all_of(model, opt), saved)
    assert sorted(folder.name for folder in two.iterdir()) == ["step-1", "step-2"]


def test_what_a_dead_job_has_left_is_cleared(two: Path) -> None:
    for name in (".writing-step-3", ".removing-step-1"):
        (two / name).mkdir()
        (two / name / "rank-0.safetensors").write_bytes(bytes(100))
    model, opt = job()
    checkpoint.save(two, model, opt, step=3)
    assert sorted(folder.name for folder in two.iterdir()) == ["step-1", "step-2", "step-3"]


# -- disks and ranks that fail -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", place], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr.decode()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def fill(rank: int, world_size: int, folder: str) -> list[str]:
    """Saves until the disk is full, then once more in the background. Returns what was raised."""
    torch.manual_seed(0)
    model = nn.Linear(200, 300)  # 1 MB of state
    opt = ShardedAdamW(model.named_parameters())
    checkpoint.save(folder, model, opt, step=1)
    raised = []
    for background in (False, True):
        with pytest.raises(CheckpointError) as error:
            for step in range(2, 20):
                checkpoint.save(folder, model, opt, step=step, background=background)
            checkpoint.wait()
        raised.append(str(error.value))
    assert checkpoint.load(folder, model, opt).step > 1
    return raised


def test_a_full_disk_leaves_what_is_there(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "5M") as disk:
        for messages in run_ranks(2, fill, str(disk)):
            for message in messages:
                assert "rank-" in message and "No space left on device after " in message and " bytes" in message
            assert "in the background has failed" in messages[1]
        assert not list(disk.glob(".*"))
        model = nn.Linear(200, 300)
        assert checkpoint.load(disk, model).step > 1


def test_a_read_only_folder(tmp_path: Path) -> None:
    model, opt = job()
    with small_disk(tmp_path / "disk", "5M") as disk:
        checkpoint.save(disk, model, opt, step=1)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(CheckpointError, match=rf"no checkpoint can be written to {disk}: Read-only file system"):
            checkpoint.save(disk, model, opt, step=2)
        assert checkpoint.load(disk, model, opt).step == 1
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        checkpoint.save(tmp_path / "file" / "here", model, opt)


def test_paths_in_the_folder_itself(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, opt = job()
    for folder in (two, two / "step-2"):
        monkeypatch.chdir(folder)
        for path in (".", "", "./", Path("."), folder):
            assert checkpoint.load(path, model, opt).step == checkpoint.info(path).step == 2
    assert checkpoint.load("..", model, opt).step == 2 and checkpoint.info("../step-1").step == 1
    (folder,) = [checkpoint.save(".", model, opt, step=3)]
    assert folder == two / "step-2" / "step-3"
    for nowhere in ("/", "nowhere", "/nowhere", two / "step-2" / "index.json"):
        for call in (lambda path: checkpoint.load(path, model, opt), checkpoint.info):
            with pytest.raises(CheckpointError):
                call(nowhere)


def _removed(rank: int, world_size: int, folder: str) -> str:
    """What a save raises while which another job begins one in the same folder, which clears ours away."""
    model, opt = job()
    written = saving.write_file

    def write(path: Path, *rest: Any) -> Any:
        try:
            return written(path, *rest)
        finally:
            shutil.rmtree(path.parent, ignore_errors=True)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as error:
        patch.setattr(saving, "write_file", write)
        checkpoint.save(folder, model, opt, step=1)
    return str(error.value)


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_jobs_that_save_into_one_folder(tmp_path: Path, world_size: int) -> None:
    for message in run_ranks(world_size, _removed, str(tmp_path)):
        assert f"another job saves into {tmp_path}, too" in message


def differ(rank: int, world_size: int, folder: str) -> list[str]:
    """What only rank 1 does wrong. Returns what each case raises here."""
    model, opt = job()
    checkpoint.save(folder, model, opt, step=1)
    one = rank == 1
    raised = []

    def expect(kind: type[Exception], **arguments: Any) -> None:
        with pytest.raises(kind) as error:
            checkpoint.save(folder, model, opt, **arguments)
        raised.append(str(error.value))

    expect(RankMismatchError, step=2 + one)
    expect(TypeError if one else RankMismatchError, step=2, extra=object() if one else None)
    broken = mock.Mock(**{"state_dict.side_effect": KeyError("no position")})
    expect(KeyError if one else RankMismatchError, step=2, data=broken if one else Stateful(3))
    expect(RankMismatchError, step=2, keep_last=2 if one else 1)
    both = {"data": broken} if one else {"data": Stateful(3), "extra": object()}
    expect(RankMismatchError if one else TypeError, step=2, **both)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_dir", lambda path: not one)
        expect(CheckpointError, step=2)
    with pytest.MonkeyPatch.context() as patch:
        pwrite = os.pwrite
        patch.setattr(os, "pwrite", (lambda *_: 0) if one else pwrite)
        expect(CheckpointError, step=2)
    with pytest.MonkeyPatch.context() as patch:  # a piece that is lost
        write = saving.write_file
        patch.setattr(saving, "write_file", lambda *given: (lambda header, held: (header, held[one:]))(*write(*given)))
        expect(CheckpointError, step=2)
    assert checkpoint.load(folder, model, opt).step == 1
    assert [path.name for path in Path(folder).iterdir()] == ["step-1"]
    return raised


def test_one_rank_that_differs_or_fails_fails_all(tmp_path: Path) -> None:
    for rank, (step, plain, data, keep, *more) in enumerate(run_ranks(2, differ, str(tmp_path))):
        both, blind, full, lost = more
        assert "rank 0 has step=2; rank 1 has step=3. Every rank must give checkpoint.save the same" in step
        assert "extra is a builtins.object, which cannot be written without pickle" in plain
        assert "no position" in data and "rank 0 has keep_last=1; rank 1 has keep_last=2" in keep
        assert "is not there for rank 1 on " in blind and "one folder that all nodes share" in blind
        assert "rank-1.safetensors: No space left on device after 0 of " in full
        assert "was not written whole: the parameter 'weight' has 15 elements, and its pieces 9" in lost
        assert both.startswith("rank 0 failed with TypeError: " * rank + "extra is a")
        assert all(message.startswith("rank 1 failed with") for message in (plain, data)) == (rank == 0)


def test_without_its_checksums_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    model, opt = job()
    with pytest.raises(CheckpointError, match=r"pip install google-crc32c"):
        checkpoint.save(tmp_path, model, opt)
    with pytest.raises(CheckpointError, match=r"pip install google-crc32c"):
        checkpoint.load(tmp_path, model, opt)
    assert not list(tmp_path.iterdir())
