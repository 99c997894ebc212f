"""Changes values of checkpoints' indexes at random, gives them the right checksums, and loads what comes of it.

    python tests/checkpoint/mutations.py --count 10000

What loads has to be what was saved. What does not has to be refused by a type of error of ours, by name, and to leave
the model, its optimizer and all that is beside them as they were, bit for bit; the folder then gives the checkpoint
before it.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import random
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
if str(HERE.parent) not in sys.path:
    sys.path.insert(0, str(HERE.parent))

from checkpoint_files import read_tensors  # noqa: E402
from compare import same  # noqa: E402
from zero_optim import GradScaler, ShardedAdamW, checkpoint  # noqa: E402
from zero_optim.checkpoint import inspection  # noqa: E402
from zero_optim.checkpoint.plain import decode  # noqa: E402
from zero_optim.errors import CheckpointError, StateMismatchError  # noqa: E402

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 0.5, -1.0, 1e300, 2**62, 2**64, 10**400, float("nan"), float("inf"), "", "x",
    "a\0b", "../x", "rank-0.safetensors", "rank-9.safetensors", "parameter", "buffer", "master", "exp_avg", "float16",
    "bfloat16", "float32", "int32", "complex64", "qint8", "deadbeef", [], {}, [[]], [0], [0, 2, 3, 1], [0, 1], [None],
    {"$x": 1}, {"$float": "nan"}, {"$float": "x"}, {"$tuple": 3}, {"$dict": [[[], 1]]}, {"$bytes": "?"},
    {"$tensor": "AA==", "dtype": "int64", "shape": [2]}, {"$tensor": "AA==", "dtype": "x"}, {"a": {"b": 1}},
]  # fmt: skip


class Model(nn.Module):
    """A convolution in channels_last, 16-bit and 32-bit parameters, a tied one, buffers, a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last, dtype=torch.bfloat16)
        self.first, self.second = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)
        self.also = self.second
        self.register_buffer("table", torch.arange(3))
        self.register_buffer("mask", torch.ones(1, 2).expand(3, 2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.first(self.conv(x.bfloat16()).flatten(2).transpose(1, 2))
        return self.second(x.float())

    def get_extra_state(self) -> int:
        return self.calls

    def set_extra_state(self, state: int) -> None:
        if type(state) is not int:
            raise TypeError(f"calls are counted, got {state!r}")
        self.calls = state


class Position:
    """In the data."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@dataclass
class Job:
    """A model with all that is saved of it. ``ours``: with a sharded optimizer, else one of torch's."""

    model: Model
    opt: Any
    given: dict[str, Any]

    @classmethod
    def make(cls, seed: int, *, ours: bool) -> Job:
        torch.manual_seed(seed)
        model = Model()
        named = list(model.named_parameters())
        groups: list[Any] = [{"params": named[:3], "lr": 1e-2}, {"params": named[3:], "weight_decay": 0.1}]
        if not ours:
            groups = [{**group, "params": [parameter for _, parameter in group["params"]]} for group in groups]
        opt = ShardedAdamW(groups) if ours else torch.optim.AdamW(groups)
        scaler = GradScaler(init_scale=4.0) if ours else torch.amp.GradScaler("cpu", init_scale=4.0)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2)
        return cls(model, opt, {"scaler": scaler, "scheduler": schedule, "data": Position()})

    def train(self, steps: int) -> None:
        scaler = self.given["scaler"]
        for _ in range(steps):
            scaler.scale(self.model(torch.randn(2, 3, 4, 4)).square().sum()).backward()
            scaler.step(self.opt)
            scaler.update()
            self.opt.zero_grad()
            self.given["scheduler"].step()
            self.given["data"].at += 1

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.model, self.opt, extra={"a": (1, 2.5)}, **self.given)

    def load(self, path: Path) -> checkpoint.Loaded:
        return checkpoint.load(path, self.model, self.opt, **self.given)

    def seen(self) -> dict[str, Any]:
        """All that a load changes, as plain values and copies."""
        state = copy.deepcopy(self.opt.state_dict())
        beside = {name: copy.deepcopy(one.state_dict()) for name, one in self.given.items()}
        weights = {name: value.clone() for name, value in self.model.state_dict().items() if torch.is_tensor(value)}
        random_states = (torch.get_rng_state(), random.getstate())
        return {
            "weights": weights,
            "state": state,
            "beside": beside,
            "calls": self.model.calls,
            "random": random_states,
        }

    def tensors(self) -> dict[tuple[str, str], Tensor]:
        """By kind and name, as a checkpoint has them."""
        found = {("parameter", name): p.detach().clone() for name, p in self.model.named_parameters()}
        found |= {("buffer", name): b.clone() for name, b in self.model.named_buffers()}
        names = [name for name, p in self.model.named_parameters()]
        for key, entry in self.opt.state_dict()["state"].items():
            name = names[key] if isinstance(key, int) else key
            found |= {(kind, name): value.clone() for kind, value in entry.items() if kind != "step"}
        return found


# -- mutations ---------------------------------------------------------------------------------------------------------


def mutate(rng: random.Random, index: dict[str, Any]) -> str:
    """Change one place of ``index``. Returns what was done, in words."""
    place: Any = index
    path: list[Any] = []
    while True:  # downwards, to any depth; a long list is not likelier than a short one
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        path.append(key)
        deeper = isinstance(place[key], dict | list) and len(place[key]) > 0
        if not deeper or (len(path) > 1 and rng.random() < 0.1):
            break
        place = place[key]
    old = place[key]
    how = rng.choice(("value", "value", "near", "near", "gone", "moved", "twice", "renamed", "swapped"))
    if how == "near" and isinstance(old, int | float) and not isinstance(old, bool) and abs(old) < 1e300:
        place[key] = rng.choice((old + 1, old - 1, -old, old * 2, old + 0.5, float(old), old * 10**9))
    elif how == "near" and isinstance(old, str):
        place[key] = rng.choice((old + "x", old[:-1], old[::-1], old.upper(), "0" * len(old)))
    elif how == "gone":
        del place[key]
    elif how == "moved":
        place[key] = copy.deepcopy(place[rng.choice(keys)])
    elif how == "twice" and isinstance(place, list):
        place.insert(key, copy.deepcopy(old))
    elif how == "renamed" and isinstance(place, dict):
        place[rng.choice((str(key) + "x", str(key)[:-1], "params", ""))] = place.pop(key)
    elif how == "swapped":
        other = rng.choice(keys)
        place[key], place[other] = place[other], place[key]
    else:
        how, place[key] = "value", copy.deepcopy(rng.choice(VALUES))
    now = place[key] if how not in ("gone", "renamed") else None
    return f"{'.'.join(map(str, path))}: {how}, {str(old)[:60]} -> {str(now)[:60]}"


def sealed(index: dict[str, Any]) -> str:
    """With the checksums of what it says."""

    def crc32c(value: Any) -> str:
        return f"{google_crc32c.value(json.dumps(value, sort_keys=True, separators=(',', ':')).encode()):08x}"

    lineage = index.get("lineage")
    if isinstance(lineage, dict):
        lineage["crc32c"] = crc32c({name: value for name, value in lineage.items() if name != "crc32c"})
    if "crc32c" in index:
        index["crc32c"] = crc32c(index.get("contents"))
    return json.dumps(index)


# -- the law -----------------------------------------------------------------------------------------------------------


class Bench:
    """Checkpoints of steps 1 and 2, of which the second's index is changed again and again."""

    def __init__(self, folder: Path, *, ours: bool) -> None:
        self.folder, self.ours = folder, ours
        saved = Job.make(0, ours=ours)
        for _ in range(2):
            saved.train(1)
            saved.save(folder)
        self.expected = saved.tensors()
        held = {key: value for key, value in read_tensors(folder / "step-1").items() if key[0] == "parameter"}
        self.older = held["parameter", "second.weight"]
        self.path = folder / "step-2" / "index.json"
        self.text = self.path.read_text()
        self.job = Job.make(1, ours=ours)
        self.job.train(1)
        self.job.save(folder.with_name(folder.name + "-other"))
        self.before = self.job.seen()

    def try_one(self, rng: random.Random) -> tuple[str, list[str]]:
        """What came of one mutation: loaded, refused or misfit; and what is wrong, in words."""
        index = json.loads(self.text)
        told = [mutate(rng, index) for _ in range(rng.choice((1, 1, 1, 2)))]
        self.path.write_text(sealed(index))
        try:
            outcome, wrong = self._outcome(index)
        except Exception as error:
            outcome, wrong = "raw", [f"{type(error).__name__}: {error}"]
        if outcome == "loaded" or wrong:
            self._restore()
        elif not same(self.job.seen(), self.before):
            wrong.append(f"{outcome}, and something was changed")
            self._restore()
        return outcome, [f"{'; '.join(told)}: {problem}" for problem in wrong]

    def _restore(self) -> None:
        """Some schedulers, and groups, keep what they have beside what is loaded: then with others."""
        other = self.folder.with_name(self.folder.name + "-other")
        self.job.load(other)
        if not same(self.job.seen(), self.before):
            self.close()
            self.job = Job.make(1, ours=self.ours)
            self.job.load(other)
            assert same(self.job.seen(), self.before)

    def close(self) -> None:
        if self.ours:
            self.job.opt.close()

    def _outcome(self, index: dict[str, Any]) -> tuple[str, list[str]]:
        try:
            checkpoint.latest(self.folder)
            checkpoint.info(self.folder)
            inspection.inspect(self.folder, quick=True)
            loaded = self.job.load(self.path.parent)
        except StateMismatchError as error:
            return "misfit", [] if "step-2" in str(error) or "does not take" in str(error) else [f"unnamed: {error}"]
        except CheckpointError as error:
            return "refused", [] if "step-2" in str(error) else [f"unnamed: {error}"]
        return "loaded", self._check_loaded(loaded, index)

    def _check_loaded(self, loaded: checkpoint.Loaded, index: dict[str, Any]) -> list[str]:
        contents = index["contents"]
        wrong = [str(key) for key, value in self.job.tensors().items() if not same(value, self.expected[key])]
        steps = {name: count for of in contents["optimizers"] for name, count in of["steps"].items()}
        names = [name for name, _ in self.job.model.named_parameters()]
        for key, entry in self.job.opt.state_dict()["state"].items():
            name = names[key] if isinstance(key, int) else key
            if float(entry["step"]) != steps[name] or not 0 <= steps[name] < 2**54:
                wrong.append(f"the step of {name}")
        if not same(loaded.extra, decode(contents.get("extra"))) or loaded.step != contents["step"]:
            wrong.append("extra or step")
        return [f"loaded, with other values: {', '.join(wrong)}"] if wrong else []

    def check_falls_back(self) -> None:
        """The index as it was left is refused: the folder gives the checkpoint before."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loaded = self.job.load(self.folder)
        assert loaded.step == 1 and any("step-2" in str(one.message) for one in caught)
        assert torch.equal(self.job.model.second.weight.detach(), self.older)
        self._restore()


def run(folder: Path, count: int, seed: int, *, ours: bool) -> tuple[collections.Counter[str], list[str]]:
    """Outcomes, and what is wrong."""
    bench, outcomes, problems = Bench(folder, ours=ours), collections.Counter[str](), []
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        outcome, wrong = bench.try_one(rng)
        outcomes[outcome] += 1
        problems += [f"{number}: {problem}" for problem in wrong]
        if outcome == "refused" and outcomes[outcome] % 20 == 1 and not wrong:
            bench.check_falls_back()
    bench.close()
    return outcomes, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    failed = False
    for ours in (True, False):
        with tempfile.TemporaryDirectory(prefix="mutations-") as work:
            start = time.perf_counter()
            outcomes, problems = run(Path(work) / "checkpoints", arguments.count // 2, arguments.seed, ours=ours)
        seconds = time.perf_counter() - start
        kind = "ShardedAdamW" if ours else "torch.optim.AdamW"
        print(f"{kind}: {sum(outcomes.values())} mutations in {seconds:.0f} s: {dict(outcomes)}", *problems, sep="\n")
        failed |= bool(problems)
    sys.exit(failed)


if __name__ == "__main__":
    main()
