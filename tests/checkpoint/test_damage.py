"""A damaged checkpoint is named and changes nothing, and the checkpoint before it loads."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from cells import slow_after
from compare import same
from harness import run_ranks
from small_jobs import FIRST, INDEX, SECOND, all_of, network, train, trained


class _Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("exploded", "w")  # into the folder in which the test runs


def _flip(file: str, place: float) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        content = bytearray((step / file).read_bytes())
        content[min(int(place * len(content)), len(content) - 1)] ^= 4
        (step / file).write_bytes(content)

    return damage


def _truncate(file: str, place: float) -> Callable[[Path], None]:
    return lambda step: os.truncate(step / file, int(place * (step / file).stat().st_size))


def _write(file: str, content: bytes) -> Callable[[Path], None]:
    return lambda step: (step / file).write_bytes(content) and None


def _append(file: str) -> Callable[[Path], None]:
    return lambda step: (step / file).write_bytes((step / file).read_bytes() + b"more") and None


def _delete(file: str) -> Callable[[Path], None]:
    return lambda step: (step / file).unlink()


def _edit_index(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        index = json.loads((step / "index.json").read_text())
        change(index)
        (step / "index.json").write_text(json.dumps(index))

    return damage


DAMAGE: dict[str, tuple[str, Callable[[Path], None]]] = {  # by name: what the error must name, and the damage
    "the last byte of rank 0": (FIRST, _flip(FIRST, 1)),
    "the last byte of rank 1": (SECOND, _flip(SECOND, 1)),
    "a byte late in rank 1": (SECOND, _flip(SECOND, 0.9)),
    **{f"a byte at {place} of the index": (INDEX, _flip(INDEX, place)) for place in (0, 0.03, 0.3, 0.5, 0.8, 1)},
    f"{INDEX} cut at 0.99": (INDEX, _truncate(INDEX, 0.99)),
    **{f"{SECOND} cut at {place}": (SECOND, _truncate(SECOND, place)) for place in (0, 0.5, 0.99)},
    **{f"{file} deleted": (file, _delete(file)) for file in (FIRST, SECOND)},
    **{f"{file} grown": (file, _append(file)) for file in (INDEX, SECOND)},
    **{f"garbage for {file}": (file, _write(file, bytes(range(256)) * 8)) for file in (INDEX, FIRST)},
    **{f"a pickle for {file}": (file, _write(file, pickle.dumps(_Bomb()))) for file in (INDEX, FIRST)},
    "another step": (INDEX, _edit_index(lambda i: i["contents"].update(step=9))),
    "no checksum": (INDEX, _edit_index(lambda i: i.pop("crc32c"))),
    "another version": (INDEX, _edit_index(lambda i: i.update(version=3))),
    "rank 1 of the checkpoint before": (
        SECOND,
        lambda step: shutil.copy(step.parent / "step-1" / SECOND, step / SECOND) and None,
    ),
}


def _load_damaged(rank: int, world_size: int, folder: str, names: list[str]) -> list[str]:
    """What is wrong, in words: each damaged checkpoint is refused, by name, and its folder loads the one before it."""
    from zero_optim import checkpoint
    from zero_optim.errors import CheckpointError

    model, opt = trained(0)
    checkpoint.save(f"{folder}/whole", model, opt, extra=1)
    expected = all_of(model, opt)
    train(model, opt, 1)
    checkpoint.save(f"{folder}/whole", model, opt, extra=2)
    wrong = []
    for name in names:
        file, damage = DAMAGE[name]
        copy = Path(folder, "copy")
        if rank == 0:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(Path(folder, "whole"), copy)
            damage(copy / "step-2")
        dist.barrier()
        other, its_opt = trained(1)
        before = all_of(other, its_opt)
        try:
            checkpoint.load(copy / "step-2", other, its_opt)
            wrong.append(f"{name}: it was loaded")
        except CheckpointError as error:
            if file not in str(error):
                wrong.append(f"{name}: {file} is not named in {error}")
        if not same(all_of(other, its_opt), before):
            wrong.append(f"{name}: it was refused, and something has changed")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = checkpoint.load(copy, other, its_opt)
        if (loaded.step, loaded.extra) != (1, 1) or not same(all_of(other, its_opt), expected):
            wrong.append(f"{name}: the folder gave something else than the checkpoint before")
        if rank == 0 and not any("step-2" in str(warning.message) for warning in caught):
            wrong.append(f"{name}: no warning")
        its_opt.close()
        dist.barrier()
    return wrong


LIKE_OTHERS = [
    "a byte late in rank 1",
    *(f"a byte at {place} of the index" for place in (0.03, 0.3, 0.8)),
    *(f"{SECOND} cut at {place}" for place in (0, 0.99)),
    f"{FIRST} deleted",
    f"garbage for {FIRST}",
    f"a pickle for {INDEX}",
]


@pytest.mark.parametrize("names", slow_after(1, [sorted(DAMAGE.keys() - LIKE_OTHERS), LIKE_OTHERS]), ids=len)
def test_damage_is_named_and_the_checkpoint_before_is_loaded(tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    for wrong in run_ranks(2, _load_damaged, str(tmp_path), names):
        assert not wrong
    assert not list(tmp_path.rglob("exploded"))


def test_an_index_of_deep_nesting_is_damage(tmp_path):
    from zero_optim import checkpoint
    from zero_optim.errors import CheckpointError

    model = network(0)
    checkpoint.save(tmp_path, model, step=1)
    (checkpoint.save(tmp_path, model, step=2) / INDEX).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=INDEX):
        checkpoint.load(tmp_path / "step-2", model)
    with pytest.warns(match="step-2"):
        assert checkpoint.load(tmp_path, model).step == 1
