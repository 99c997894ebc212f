"""A program of a seed: plain data, so that it can be printed, kept in a file and made smaller.

``{"world", "config", "runs", "ops"}``. Each entry of ``ops`` is legal wherever it stands, and most keys of an entry may
be left out: ``execute`` has the defaults. That is what lets ``law.Stores.smaller`` drop anything.
"""

from __future__ import annotations

import random
from typing import Any

Op = dict[str, Any]
Program = dict[str, Any]

OPS = {
    "train": 24,
    "eval": 1,
    "bare_step": 1,
    "set": 2,
    "freeze": 1,
    "thaw": 1,
    "zero": 1,
    "edit": 1,
    "add_group": 1,
    "observe": 1,
    "read_state": 1,
    "read_full": 1,
    "read_model": 1,
    "save_state": 1,
    "load_state": 1,
    "save_full": 1,
    "load_full": 1,
    "save_model": 1,
    "load_model": 1,
    "save_checkpoint": 1,
    "load_checkpoint": 1,
    "remake": 2,
    "reset_state": 0.3,
    "forward_only": 1,
    "data_edit": 1,
    "writeback": 1,
}
MID_OPS = {
    "set": 6,
    "edit": 2,
    "data_edit": 1,
    "read_state": 2,
    "read_full": 2,
    "save_state": 1,
    "eval": 1,
    "drop_grad": 2,
    "edit_grad": 2,
    "freeze": 1,
    "stats": 1,
    "zero": 1,
    "backward": 2,
}


class Generator:
    """Draws one program."""

    def __init__(self, seed: int, world: int) -> None:
        self.random = random.Random(f"{seed} {world} False")  # of which the tests have chosen seeds
        self.world = world
        self.chance = lambda p: self.random.random() < p

    def program(self) -> Program:
        draw = self.random
        self.config = self._config()
        ops = [self._train(quiet=self.chance(0.7)) for _ in range(draw.choice([1, 2, 3, 4, 5]))]
        ops += [self._op() for _ in range(draw.choice([2, 4, 6, 8, 12]))]
        runs = [self._stores() for _ in range(draw.choice([1, 1, 2]))]
        return {"world": self.world, "config": self.config, "runs": runs, "ops": ops}

    def _config(self) -> dict[str, Any]:
        draw, several = self.random, self.world > 1
        stage = draw.choices([0, 1, 2, 3], [1, 2, 4, 4] if several else [1, 1, 2, 2])[0]
        kind = draw.choice(["fp32", "bf16", "bf16", "fp16", "mixed"])
        blocks = draw.randint(1, 4)
        dtypes = [draw.choice(["fp32", "bf16", "fp16"]) if kind == "mixed" else kind for _ in range(blocks + 2)]
        config: dict[str, Any] = {
            "stage": stage,
            "width": 640 if self.chance(0.03) else draw.choice([3, 8, 13, 16, 33]),
            "dtypes": dtypes,
            "lr": draw.choice([1e-3, 1e-2, 0.1]),
        }
        options = {
            "norm_dtype": (0.15, ["fp32", "bf16"]),
            "models": (0.15, [2]),
            "chained": (0.5, [True]),
            "tied": (0.15, [True]),
            "recompute": (0.15, ["reentrant", "nonreentrant"]),
            "scaler": (0.7 if "fp16" in dtypes else 0.1, [True]),
            "schedule": (0.2, [True]),
            "hook": (0.08, ["before", "after"]),
            "odd": (0.15, [True]),
            "frozen": (0.2, [[draw.randrange(12)]]),
            "tensor_lr": (0.15, [True]),
            "naming": (0.5, ["plain", "groups"]),
            "weight_decay": (0.5, [0.0, 0.5]),
            "betas": (0.3, [[0.5, 0.9], [0.0, 0.99]]),
            "bucket_cap_mb": (0.7, [1e-4, 1e-3, 2e-3, 1e-2]),
            "max_grad_norm": (0.2, [1e-3, 0.1, 1.0, 10.0]),
            "overlap_param_gather": (0.25, [True]),
            "overlap_grad_reduce": (0.1, [False]),
            "grad_reduce_dtype": (0.15, ["fp32"]),
            "skip_nonfinite": (0.1, [False]),
            "decoupled_weight_decay": (0.1, [False]),
            "maximize": (0.1, [True]),
            "reshard_after_forward": (0.2, [False]),
            "prefetch": (0.3, [0, 2]),
        }
        return config | {name: draw.choice(values) for name, (p, values) in options.items() if self.chance(p)}

    def _stores(self) -> list[dict[str, Any]]:
        """Of the optimizers of a run in the order in which they are made; the last is that of all others."""
        draw, stores = self.random, []
        one = self.chance(0.5)
        for _ in range(1 if one else 3):
            speculates = self.world > 1 and self.config["stage"] and "fp32" not in self.config["dtypes"]
            kind = draw.choice(["paged", "cpu", "nvme"] + ["cpu"] * (3 if speculates else 1))
            store: dict[str, Any] = {"state_offload": kind}
            if kind == "paged":
                budgets = [0, 0, 1536, 3072, draw.randrange(40000), "4KiB", "10KB", "auto", None]
                store["device_budget"] = draw.choice(budgets)
            if kind == "cpu":
                store["speculate"] = draw.choice([True, None, False] if not speculates else [True, None, None, False])
            if self.chance(0.08):
                store = {"state_offload": None}
            stores.append(store)
        if self.config["stage"] == 3 and self.chance(0.5):
            stores[0]["param_offload"] = "cpu"
        return stores

    def _op(self) -> Op:
        name = self.random.choices(list(OPS), list(OPS.values()))[0]
        return self._train(quiet=self.chance(0.4)) if name == "train" else self._small(name)

    def _small(self, name: str) -> Op:
        draw, op = self.random, {"op": name}
        if name in ("eval", "forward_only"):
            op |= {"data": draw.randrange(1000), "use": self._use()}
        if name == "set":
            op |= self._setting()
        if name in ("edit", "data_edit", "writeback", "edit_grad", "drop_grad", "freeze", "thaw"):
            op["which"] = draw.choice([0, 1, 2, 3, 5, 7, 9, *(["all"] if name in ("thaw", "edit") else [])])
        if name == "edit_grad":
            op["how"] = draw.choice(["halve", "zero", "clip"])
        if name == "backward":
            op |= {"data": draw.randrange(1000), "use": self._use()} | ({"no_sync": True} if self.chance(0.4) else {})
        if name == "save_checkpoint" and self.chance(0.4):
            op["background"] = True
        if name == "edit":
            op["how"] = draw.choice(["mul", "add", "copy", "zero"])
        if name == "zero":
            op["how"] = self._zero()
        if name.startswith(("save_", "load_")):
            op["slot"] = draw.choice([0, 0, 1])
        if name in ("save_state", "remake"):
            op["how"] = draw.choice(["copy", "file"])
        if name == "load_state":
            op["model_too"] = self.chance(0.5)
        if name == "remake":
            op["carry"] = draw.choice(["nothing", "state", "full", "checkpoint"])
            if self.config["stage"] < 3 and self.chance(0.3):
                op["stage"] = draw.randrange(3)
        if name in ("load_model", "load_state", "load_full", "load_checkpoint", "freeze", "thaw", "remake"):
            op["zero"] = "opt"
        return op

    def _setting(self) -> Op:
        draw = self.random
        value: Any
        name = draw.choice(["lr", "lr", "weight_decay", "betas", "max_grad_norm", "eps", "skip_nonfinite"])
        if name == "lr":
            value = draw.choice([0.0, 1e-3, 3e-3, 0.03])
        elif name == "max_grad_norm":
            value = draw.choice([None, 1e-3, 0.5])
        elif name == "skip_nonfinite":
            value = draw.choice([True, False])
        elif name == "betas":
            value = draw.choice([[0.9, 0.95], [0.0, 0.5]])
        elif name == "eps":
            value = 1e-6
        else:
            name, value = "weight_decay", draw.choice([0.0, 0.1, 1.0])
        return {"name": name, "value": value} | ({"groups": 1} if self.chance(0.3) else {})

    def _zero(self) -> str:
        return self.random.choice(["opt", "opt", "opt", "opt_zeros", "model", "model_zeros", "none"])

    def _use(self) -> list[list[int]]:
        """By rank, by block: 0 unused, 1 used but for its gain, 2 all of it."""
        blocks, draw = len(self.config["dtypes"]) - 2, self.random
        everywhere = [draw.choice([0, 1, 2, 2, 2]) for _ in range(blocks)]
        if self.chance(0.7):
            return [everywhere] * self.world
        return [[draw.choice([0, 1, 2]) for _ in range(blocks)] for _ in range(self.world)]

    def _train(self, quiet: bool) -> Op:
        """``quiet``: an ordinary step, of which a speculating store needs some before it assumes anything."""
        draw = self.random
        op: Op = {"op": "train", "data": draw.randrange(1000)}
        micros = 1 if quiet else draw.choice([1, 1, 1, 2, 3])
        op["micros"] = [self._micro(quiet, number + 1 == micros) for number in range(micros)]
        if self.chance(0.4):
            op["clip"] = self._clip(quiet)
        if self.chance(0.5):
            op["unscale"] = True
        if not quiet:
            for place in ("mid", "late"):
                if self.chance(0.4):
                    names = draw.choices(list(MID_OPS), list(MID_OPS.values()), k=draw.choice([1, 1, 2]))
                    op[place] = [self._small(name) for name in names]
            if self.chance(0.12) and self.world > 1:
                op["idle"] = [draw.randrange(self.world)]
            op["steps"] = draw.choice([1, 1, 1, 1, 2, 0])
            op["zero"] = self._zero()
        if self.chance(0.2):
            op["look"] = False
        return op

    def _micro(self, quiet: bool, last: bool) -> Op:
        micro: Op = {}
        if not quiet and self.chance(0.1 if last else 0.6):
            micro["no_sync"] = True
        if not quiet and self.chance(0.6):
            micro["use"] = self._use()
        rank = self.random.randrange(self.world)
        if self.chance(0.06):
            micro["overflow"] = {"rank": rank, "value": self.random.choice(["inf", "nan", "1e30"])}
        if not quiet and self.chance(0.12):
            kind = self.random.choice(["bomb", "bomb", "fail"])
            place = self.random.choice(["first", *range(len(self.config["dtypes"]) - 2)])
            micro[kind] = {
                "ranks": self.random.choice([[rank], "all"]),
                "at": place,
                "then": self.random.choice(["step", "zero"]),
            }
        return micro

    def _clip(self, quiet: bool) -> Op:
        clip: Op = {"max_norm": self.random.choice([1e-3, 0.05, 0.5, 2.0, 1e6, 1e6])}
        if self.chance(0.3):
            clip["norm_type"] = self.random.choice([1.0, 3.0, "inf"])
        if not quiet and self.chance(0.3):
            clip["which"] = self.random.choice([0, 1, 2, 3, 5])
        return clip


def generate(seed: int, world: int) -> Program:
    return Generator(seed, world).program()
