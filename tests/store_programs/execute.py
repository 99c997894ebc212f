"""Runs a program on this rank with one list of stores, and gives the trace: all that it computed, in order."""

from __future__ import annotations

import collections
import contextlib
import itertools
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import zero_optim
from programs.world import Planned
from torch import Tensor, nn
from zero_optim import checkpoint

from store_programs.generate import Op, Program
from store_programs.models import DTYPES, Block, Model
from store_programs.operations import Operations

Trace = list[tuple[str, Any]]
OPTIONS = (  # of the configuration, which go to the optimizer as they are
    "bucket_cap_mb",
    "max_grad_norm",
    "overlap_param_gather",
    "overlap_grad_reduce",
    "skip_nonfinite",
    "decoupled_weight_decay",
    "maximize",
    "weight_decay",
)


def plain(value: Any) -> Any:
    """A value by which two runs are compared: tensors and shards are copied, floats are written exactly."""
    if hasattr(value, "local"):
        return value.local.detach().clone().flatten()
    if isinstance(value, Tensor):
        return value.detach().clone().flatten()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value.hex() if isinstance(value, float) else value


class Machine(Operations):
    """One run of one program on this rank. ``stores``: of its optimizers in order."""

    def __init__(
        self, program: Program, rank: int, stores: list[dict[str, Any]], folder: str, tick: Callable[[], None]
    ) -> None:
        self.program, self.config, self.rank, self.world = program, program["config"], rank, program["world"]
        self.stores, self.folder, self.tick = stores, folder, tick
        self.trace: Trace = []
        self.saved: dict[tuple[str, int], Any] = {}
        self.speculated: collections.Counter[str] = collections.Counter()
        self.made = itertools.count()
        self.stage = self.config["stage"]
        self.zeros_since_step = self.rounds_since_step = 0
        self.thawed = False
        self.optimizers: list[Any] = []
        self.idle: list[int] = []  # ranks that make no backward now

    # The run

    def run(self) -> Trace:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ended = self._guarded("construct", self._construct)
            for number, op in enumerate(self.program["ops"]):
                if ended:
                    break
                ended = self._guarded(f"{number} {op['op']}", lambda op=op: getattr(self, f"do_{op['op']}")(op))
                self._look(op)
            self._guarded("close", self._close)
        return self.trace

    def _guarded(self, label: str, call: Callable[[], None]) -> bool:
        """Whether a rank raised what the program did not say. Then the program is over, on all ranks."""
        self.label = label
        raised = ""
        try:
            call()
        except Exception as error:
            raised = type(error).__name__
            self.see("raised", raised)
            frames = [f"{Path(f.filename).name}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
            self.message = f"{label}: {raised}: {str(error)[:600]}\n  at {', '.join(frames[-4:])}"
        votes = torch.tensor([float(bool(raised))])
        try:
            if dist.is_initialized():
                dist.all_reduce(votes)
        except RuntimeError as error:
            said = self.message if raised else "nothing"
            raise RuntimeError(f"after {label}, in which this rank raised {said}: {error}") from error
        if votes.item() and not raised:
            self.see("another rank raised", True)
        return bool(votes.item())

    def see(self, what: str, value: Any) -> None:
        self.trace.append((f"{self.label}: {what}", plain(value)))
        self.tick()

    def _look(self, op: Op) -> None:
        if not op.get("look", True) or (self.config.get("overlap_param_gather") and op["op"] == "train"):
            return
        with contextlib.suppress(Exception):
            self._wait()
            self._see_parameters()

    def _see_parameters(self) -> None:
        self.see("parameters", {name: p for m in self.models for name, p in self._named(m)})
        self.see("counts", [{k: o.stats()[k] for k in ("steps", "skipped_steps")} for o in self.optimizers])
        self.see("non_finite", [o.stats()["non_finite"] for o in self.optimizers])

    def _named(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        return [(f"{self.models.index(model)}.{name}", p) for name, p in model.named_parameters()]

    # Making

    @property
    def sharded(self) -> bool:
        return self.stage == 3

    def _construct(self) -> None:
        self.models = []
        for number in range(self.config.get("models", 1)):
            torch.manual_seed(number)
            self.models.append(Model(self.config))
        parameters = [p for model in self.models for p in model.parameters()]
        for index in self.config.get("frozen", []):
            parameters[index % len(parameters)].requires_grad_(False)
        for model in self.models:
            model.head.requires_grad_(True)
        if self.sharded:
            offload = self.stores[0].get("param_offload")
            kept = {name: self.config[name] for name in ("reshard_after_forward", "prefetch") if name in self.config}
            for model in self.models:
                zero_optim.shard_module(
                    model, units=(Block,), **kept, **({"param_offload": offload} if offload else {})
                )
        self.scaler = zero_optim.GradScaler(init_scale=2.0**8, growth_interval=3) if self.config.get("scaler") else None
        if self.config.get("hook") == "before":
            self._hook()
        self._make_optimizers()
        if self.config.get("hook") == "after":
            self._hook()

    def _hook(self) -> None:
        """A hook of the user's that edits a gradient as it is ready."""
        for model in self.models:
            model.head.weight.register_post_accumulate_grad_hook(_halve)

    def _make_optimizers(self) -> None:
        self.optimizers = [self._make(model) for model in self.models]
        self.schedulers = []
        if self.config.get("schedule"):
            self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5) for o in self.optimizers]

    def _make(self, model: Model) -> Any:
        config = self.config
        lr = torch.tensor(config["lr"]) if config.get("tensor_lr") else config["lr"]
        options = {name: config[name] for name in OPTIONS if name in config} | {"lr": lr}
        if "betas" in config:
            options["betas"] = tuple(config["betas"])
        if "grad_reduce_dtype" in config:
            options["grad_reduce_dtype"] = DTYPES[config["grad_reduce_dtype"]]
        optimizer = zero_optim.ShardedAdamW(self._given(model), stage=self.stage, **options, **self._next_store())
        if config.get("overlap_param_gather"):
            optimizer.attach(model)
        return optimizer

    def _given(self, model: Model) -> Any:
        naming = self.config.get("naming")
        named = [(name, p) for name, p in model.named_parameters() if not name.startswith("extra.")]
        groups: list[dict[str, Any]] = [{"params": named}]
        if naming == "groups":
            flat = [(name, p) for name, p in named if p.ndim < 2]
            groups = [
                {"params": [(name, p) for name, p in named if p.ndim >= 2]},
                {"params": flat, "weight_decay": 0.3},
            ]
        if hasattr(model, "extra"):
            groups.append(self._extra_group(model))
        if naming:
            groups = [
                group | {"params": [p[1] if isinstance(p, tuple) else p for p in group["params"]]} for group in groups
            ]
        return groups

    def _extra_group(self, model: Model) -> dict[str, Any]:
        named = [(f"extra.{name}", p) for name, p in model.extra.named_parameters()]
        given = [p for _, p in named] if self.config.get("naming") else named
        return {"params": given, "weight_decay": 0.2}

    def _next_store(self) -> dict[str, Any]:
        store = dict(self.stores[min(next(self.made), len(self.stores) - 1)])
        store.pop("param_offload", None)
        if store["state_offload"] == "nvme":
            store["state_offload"] = f"nvme:{self.folder}/pages"
        return {name: value for name, value in store.items() if value is not None}

    def _close(self) -> None:
        checkpoint.wait()  # for one in the background, whose folder goes with the run
        for optimizer in self.optimizers:
            self._count(optimizer)
            optimizer.close()

    def _count(self, optimizer: Any) -> None:
        self.speculated.update((optimizer.stats().get("state_offload") or {}).get("speculated") or {})

    # A step

    def do_train(self, op: Op) -> None:
        micros = op["micros"]
        self.idle = self._idle_ranks(op)
        for number, micro in enumerate(micros):
            if failure := self._interruption(micro, len(micros)):
                self._interrupted(op, number, micro, failure)
                return
            self._backward(op, number, micro)
        if not self.idle:  # the next call is the step, which launches what the idle rank owes
            self._small_ops(op.get("mid", []))
            if self.scaler and op.get("unscale"):
                for optimizer in self.optimizers:
                    self.scaler.unscale_(optimizer)
            self._clip(op.get("clip"))
            self._small_ops(op.get("late", []))
        for _ in range(op.get("steps", 1)):
            self._step(scaled=True)
        self.idle = []
        if not op.get("steps", 1) and self.scaler:  # its note of unscale_ would meet the next step
            self.scaler = zero_optim.GradScaler(init_scale=2.0**8, growth_interval=3)
        for scheduler in self.schedulers:
            scheduler.step()
        self._zero(op.get("zero", "opt"))

    def _idle_ranks(self, op: Op) -> list[int]:
        """Ranks that make no backward, where that is allowed: in a step of one synchronised one, not at stage 3."""
        one_round = len(op["micros"]) == 1 and not op["micros"][0].get("no_sync") and not self.rounds_since_step
        allowed = one_round and self.stage != 3 and (self.stage or len(self.models) == 1) and op.get("steps", 1)
        return op.get("idle", []) if allowed else []

    def _backward(
        self, op: Op, number: int, micro: Op, bomb: Any = None, fail: Any = None, take_part: bool = True
    ) -> None:
        with contextlib.ExitStack() as stack:
            if micro.get("no_sync"):
                for optimizer in self.optimizers:
                    stack.enter_context(optimizer.no_sync())
            else:
                self.rounds_since_step += 1
            loss = self._loss(op["data"] + 7 * number, self._use(micro), bomb, fail)
            self.see("loss", loss)
            overflow = micro.get("overflow", {})
            if overflow.get("rank") == self.rank:
                loss = loss * float(overflow["value"])
            if self.scaler:
                loss = self.scaler.scale(loss)
            if self.rank not in self.idle:
                loss.backward()
        self.thawed = False

    def _use(self, op: Op) -> list[int]:
        blocks = len(self.config["dtypes"]) - 2
        if self.thawed and self.sharded or "use" not in op:
            return [2] * blocks
        return op["use"][self.rank][:blocks]

    def _loss(self, data: int, use: list[int], bomb: Any = None, fail: Any = None) -> Tensor:
        generator = torch.Generator().manual_seed(data * 10 + self.rank)
        x, y = torch.randn((2, 4, self.config["width"]), generator=generator)
        total = torch.zeros(())
        for model in self.models:
            out = model(x, use, bomb, fail).float()
            total = total + (out - y).square().mean()
            if self.config.get("chained"):
                x = out
        return total

    def _interruption(self, micro: Op, micros: int) -> str:
        """Whether a backward ("bomb") or forward ("fail") raises, where the rules for several ranks allow it."""
        for kind in ("bomb", "fail"):
            if kind not in micro:
                continue
            if micro[kind]["ranks"] == "all" or self.world == 1:
                return kind
            if len(self.models) > 1 and self.stage in (0, 3):
                continue
            if micro[kind]["at"] == "first" and self.rounds_since_step and not self._zeroing_settles():
                continue  # an earlier round of this step has left: ``step`` would wait for one
            if kind == "bomb" or (self.stage != 3 and micros == 1 and not self.rounds_since_step):
                return kind
        return ""

    def _zeroing_settles(self) -> bool:
        return self.stage > 0 and self.zeros_since_step > 0

    def _interrupted(self, op: Op, number: int, micro: Op, kind: str) -> None:
        raises, before = micro[kind]["ranks"] == "all" or self.rank in micro[kind]["ranks"], self.rounds_since_step
        try:
            self._backward(op, number, micro, **({kind: micro[kind]["at"]} if raises else {}))
        except Planned:
            self.see("boom", True)
        no_trace = kind == "fail" or micro[kind]["at"] == "first" or self.stage == 3
        needs_step = self.stage == 0 or (no_trace and not self.zeros_since_step)
        if needs_step or (micro[kind]["then"] == "step" and not (no_trace and before)):
            self._step(scaled=False)
        self._zero("opt")
        if self.scaler:
            self.scaler = zero_optim.GradScaler(init_scale=2.0**8, growth_interval=3)

    def _step(self, scaled: bool) -> None:
        for optimizer in self.optimizers:
            if self.scaler and scaled:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler and scaled:
            self.scaler.update()
            self.see("scale", self.scaler.get_scale())
        self.zeros_since_step = self.rounds_since_step = 0

    def _clip(self, clip: Op | None) -> None:
        if not clip:
            return
        for optimizer in self.optimizers:
            trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
            some = [trained[clip["which"] % len(trained)]] if "which" in clip else None
            norm_type = float(clip.get("norm_type", 2.0))
            self.see("norm", optimizer.clip_grad_norm_(clip["max_norm"], norm_type, some))

    def _zero(self, how: str) -> None:
        to_none = not how.endswith("_zeros")
        if how == "none":
            return
        if how.startswith("model"):
            for model in self.models:
                model.zero_grad(set_to_none=to_none)
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=to_none)
        self.zeros_since_step += 1


@torch.no_grad()
def _halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)
