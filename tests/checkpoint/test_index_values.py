"""An index with the right checksum and wrong values: refused before anything changes, and the one before is loaded."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutations import Job, run, same, sealed
from zero_optim import checkpoint
from zero_optim.errors import CheckpointError


def _tensor(contents: dict[str, Any], kind: str = "exp_avg", name: str = "conv.weight") -> dict[str, Any]:
    return next(of for of in contents["tensors"] if (of["kind"], of["name"]) == (kind, name))


def _steps(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda c: c["optimizers"][0]["steps"].update({"conv.weight": value})


def _piece(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda c: _tensor(c)["pieces"][0].update(values)


def _group(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda c: c["optimizers"][0]["groups"][0].update(values)


def _own(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda c: c["ranks"][0].update(values)


# By name: what is changed in the contents, and what is said.
EDITS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a step": (lambda c: c.update(step=-1), "the step cannot be -1"),
    "a step that is a flag": (lambda c: c.update(step=True), "the step cannot be True"),
    "updates that are no number": (_steps(float("nan")), "NaN is no number of JSON"),
    "updates without end": (_steps(10**400), "counts 1000"),
    "updates below none": (_steps(-1.0), "counts -1.0 updates of 'conv.weight'"),
    "half an update": (_steps(0.5), "counts 0.5 updates"),
    "updates in another type": (_steps(2), "in another type of number"),
    "updates of nobody": (lambda c: c["optimizers"][0]["steps"].update(x=1.0), "that it does not have: 'x'"),
    "uncounted updates": (lambda c: c["optimizers"][0].update(steps={}), "does not count the updates of"),
    "an offset": (_piece(offset=0.5), "the place of a piece"),
    "an offset elsewhere": (_piece(offset=1024), "differ on the exp_avg of 'conv.weight'"),
    "a checksum": (_piece(crc32c=["xyz"]), "has checksums that are none"),
    "another checksum": (_piece(crc32c=["00000000"]), "is damaged: bytes"),
    "a file": (_piece(file="../x"), "lies outside of"),
    "a dtype of the same size": (lambda c: _tensor(c, "parameter").update(dtype="float16"), "differ on the parameter"),
    "a dtype that safetensors lacks": (lambda c: _tensor(c).update(dtype="qint8"), "qint8"),
    "a shape": (lambda c: _tensor(c).update(shape=[4, 3, 4, 1]), "differ on the exp_avg of 'conv.weight'"),
    "a size": (lambda c: _tensor(c).update(shape=[4, 3, 2, -2]), "a size of 'conv.weight' cannot be -2"),
    "no order": (lambda c: _tensor(c).pop("order"), "has dimensions in several orders"),
    "an order": (lambda c: _tensor(c, "parameter").update(order=[0, 2, 3, 1]), "differ on the parameter"),
    "a name": (lambda c: _tensor(c).update(name=3), "a tensor's name cannot be 3"),
    "another name": (lambda c: _tensor(c, "buffer", "table").update(name="board"), "differ: 'buffer:board:0'"),
    "a tensor less": (lambda c: c["tensors"].remove(_tensor(c, "buffer", "table")), "differ: 'buffer:table:0'"),
    "a tensor twice": (lambda c: c["tensors"].append(_tensor(c)), "a tensor is there twice"),
    "files": (lambda c: c["files"].update({"a\0b": 1}), "is no rank's file"),
    "aliases": (lambda c: c.update(aliases=[]), "aliases cannot be"),
    "an alias of nothing": (lambda c: c["aliases"].update(x="y"), "'x' cannot be another name of 'y'"),
    "groups": (lambda c: c["optimizers"][0].update(groups=None), "the groups of optimizer 0 cannot be None"),
    "a parameter of a group": (lambda c: c["optimizers"][0]["groups"][0]["params"].append("x"), "not there: 'x'"),
    "a parameter of two groups": (
        lambda c: c["optimizers"][0]["groups"][1]["params"].append("conv.weight"),
        "optimizer 0 has a parameter twice",
    ),
    "a parameter of no group": (
        lambda c: c["optimizers"][0]["groups"][0]["params"].remove("conv.weight"),
        "updates of parameters that it does not have: 'conv.weight'",
    ),
    "a rate": (_group(lr="x"), "lr of parameter group 0 must be a number, got 'x'"),
    "a rate without end": (_group(lr={"$float": "inf"}), "lr of parameter group 0 must be 0 or more"),
    "no rate": (lambda c: c["optimizers"][0]["groups"][0].pop("lr"), "parameter group 0 has no lr"),
    "a flag": (_group(maximize=3), "maximize of parameter group 0 must be True or False, got 3"),
    "no masters": (lambda c: c["optimizers"][0].update(master=None), "the masters of optimizer 0"),
    "other masters": (lambda c: c["optimizers"][0].update(master="exp_avg"), "the masters of optimizer 0"),
    "the order of buckets": (lambda c: c["optimizers"][0].update(order=["conv.weight"] * 2), "names one twice"),
    "extra": (lambda c: c.update(extra={"$x": 1}), "a value of a kind that is not known here"),
    "the state of a module": (lambda c: c.update(module_states={"": {"$tensor": "?"}}), "cannot be read"),
    "fewer ranks": (lambda c: c.update(ranks=[]), "0 ranks are there, and the files of 1"),
    "ranks": (lambda c: c.update(ranks=[{}]), "rank 0 has another form"),
    "random states": (lambda c: c["ranks"][0]["random"].update(torch=3), "what rank 0 had of its own"),
    "random states of Python": (lambda c: c["ranks"][0]["random"].update(python=[1]), "what rank 0 had of its own"),
    "a position in data": (_own(data={"$tuple": 1}), "what rank 0 had of its own"),
    "something unknown": (lambda c: c.update(more=1), "more"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Job]:
    """Checkpoints of steps 1 and 2, and another job, of which there is one, too."""
    folder = tmp_path_factory.mktemp("values") / "two"
    saved = Job.make(0, ours=True)
    for _ in range(2):
        saved.train(1)
        saved.save(folder)
    job = Job.make(1, ours=True)
    job.train(1)
    job.save(folder.with_name("other"))
    return folder, job


@pytest.mark.parametrize("edit", EDITS)
def test_wrong_values_are_refused_before_anything_changes(bench: tuple[Path, Job], edit: str) -> None:
    change, message = EDITS[edit]
    folder, job = bench
    path = folder / "step-2" / "index.json"
    text = path.read_text()
    try:
        index = json.loads(text)
        change(index["contents"])
        path.write_text(sealed(index))
        before = job.seen()
        with pytest.raises(CheckpointError, match="step-2") as raised:
            job.load(folder / "step-2")
        assert message in str(raised.value)
        assert same(job.seen(), before)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert job.load(folder).step == 1
        assert any("step-1 was loaded, and none that is newer" in str(one.message) for one in caught)
    finally:
        path.write_text(text)
        assert job.load(folder).step == 2
        job.load(folder.with_name("other"))


@pytest.mark.parametrize("ours", [True, False])
def test_any_value_that_is_changed_is_refused_or_right(tmp_path: Path, ours: bool) -> None:
    """``mutations.py`` does it ten thousand times."""
    outcomes, problems = run(tmp_path / "checkpoints", 60, 1, ours=ours)
    assert problems == []
    assert outcomes["refused"] > 20 and outcomes["loaded"] > 5 and outcomes.total() == 60


def test_what_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.make(0, ours=True)
    job.train(1)
    job.save(tmp_path)
    job.train(1)
    monkeypatch.setitem(job.opt.param_groups[0], "lr", -1.0)  # nothing but a step would have told
    with pytest.raises(CheckpointError, match=r"step-2 cannot be written, as no load could read it: lr of .* group 0"):
        job.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-1"]
    assert checkpoint.info(tmp_path).step == 1
