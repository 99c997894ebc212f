"""The operations of a program other than its steps: each ``do_NAME`` does one entry, as ``generate`` writes it."""

from __future__ import annotations

import collections
import contextlib
import copy
import io
import math
from collections.abc import Iterable
from typing import Any

import torch
import zero_optim
from torch import Tensor, nn
from zero_optim import checkpoint

from store_programs.generate import Op
from store_programs.models import Model


class Operations:
    """What ``Machine`` does between steps, and between a backward and its step."""

    config: dict[str, Any]
    rank: int
    world: int
    folder: str
    stage: int
    sharded: bool
    models: list[Model]
    optimizers: list[Any]
    idle: list[int]
    saved: dict[tuple[str, int], Any]
    thawed: bool
    zeros_since_step: int
    rounds_since_step: int

    def _small_ops(self, ops: Iterable[Op]) -> None:
        for op in ops:
            getattr(self, f"do_{op['op']}")(op)

    def do_zero(self, op: Op) -> None:
        self._zero(op.get("how", "opt"))

    def do_bare_step(self, op: Op) -> None:
        self._step(scaled=False)

    def do_eval(self, op: Op) -> None:
        with torch.no_grad():
            self.see("loss", self._loss(op.get("data", 0), self._use(op)))

    def do_forward_only(self, op: Op) -> None:
        self.see("loss", self._loss(op.get("data", 0), self._use(op)))

    def do_set(self, op: Op) -> None:
        name, value = op["name"], op["value"]
        for optimizer in self.optimizers:
            if name in ("max_grad_norm", "skip_nonfinite"):
                setattr(optimizer, name, value)
                continue
            for group in optimizer.param_groups[: op.get("groups")]:
                if name == "lr" and isinstance(group["lr"], Tensor):
                    group["lr"].fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value

    def _chosen(self, op: Op, model: Model | None = None) -> list[Tensor]:
        """Of one model, or of all: the parameter that the operation names, or every one."""
        parameters = [p for m in ([model] if model else self.models) for p in m.parameters()]
        which = op.get("which", "all")
        return parameters if which == "all" else [parameters[which % len(parameters)]]

    def do_backward(self, op: Op) -> None:
        """One more, which discards a clip before it."""
        if not self.idle:
            self._backward(op, 3, op)

    def do_freeze(self, op: Op) -> None:
        self._zero(op.get("zero", "none"))
        for parameter in self._chosen(op):
            if all(parameter is not p for model in self.models for p in model.head.parameters()):
                parameter.requires_grad_(False)

    def do_thaw(self, op: Op) -> None:
        self._zero(op.get("zero", "none"))
        for parameter in self._chosen(op):
            self.thawed |= not parameter.requires_grad
            parameter.requires_grad_(True)

    def _wait(self) -> None:
        if self.config.get("overlap_param_gather"):
            for optimizer in self.optimizers:
                optimizer.wait_for_parameters()

    @torch.no_grad()
    def do_edit(self, op: Op) -> None:
        self._wait()
        for model in self.models:
            whole = zero_optim.gather_parameters(model, writeback=True) if self.sharded else contextlib.nullcontext()
            if self.stage == 3 and self._in_a_step():
                return
            with whole:
                for parameter in self._chosen(op, model):
                    _edit(parameter, op.get("how", "add"))

    def _in_a_step(self) -> bool:
        return self.rounds_since_step > 0

    def do_writeback(self, op: Op) -> None:
        self.do_edit(op)

    @torch.no_grad()
    def do_data_edit(self, op: Op) -> None:
        if self.sharded:
            return
        self._wait()
        for parameter in self._chosen(op):
            parameter.data.mul_(0.75)
        for optimizer in self.optimizers:
            optimizer.refresh_master()

    def _readable(self) -> bool:
        """Whether ``.grad`` is this rank's to edit."""
        own_until_step = self.stage == 1 and self.config.get("overlap_grad_reduce") is False
        return self.world == 1 or self.stage == 0 or own_until_step

    @torch.no_grad()
    def do_edit_grad(self, op: Op) -> None:
        """On every rank alike: of a reduced gradient that is sharded, this rank's part."""
        for parameter in self._chosen(op):
            gradient = parameter.grad
            if gradient is None:
                continue
            if not self._readable() and hasattr(gradient, "local"):
                gradient.zero_() if op.get("how") == "zero" else gradient.local.mul_(0.5)
            elif self._readable():
                self.see("gradient", gradient)
                gradient.zero_() if op.get("how") == "zero" else gradient.mul_(0.5)
        if op.get("how") == "clip" and self.world == 1:
            every = [p for model in self.models for p in model.parameters()]
            self.see("norm of torch", nn.utils.clip_grad_norm_(every, 0.1))

    def do_drop_grad(self, op: Op) -> None:
        for parameter in self._chosen(op):
            parameter.grad = None

    def do_stats(self, op: Op) -> None:
        self.see("skipped", [o.stats()["skipped_steps"] for o in self.optimizers])

    def do_add_group(self, op: Op) -> None:
        if self.stage == 3:
            return
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            if not hasattr(model, "extra"):
                model.add_extra()
                optimizer.add_param_group(self._extra_group(model))
                if self.config.get("overlap_param_gather"):
                    optimizer.attach(model)

    def do_observe(self, op: Op) -> None:
        for optimizer in self.optimizers:
            optimizer.observe()

    def do_reset_state(self, op: Op) -> None:
        self._zero("opt")
        for optimizer in self.optimizers:
            optimizer.state = collections.defaultdict(dict)

    # States

    def do_read_state(self, op: Op) -> None:
        self.see("state_dict", [_by_name(o.state_dict()) for o in self.optimizers])

    def do_read_full(self, op: Op) -> None:
        self.see("full state", [zero_optim.full_state_dict(o, rank=None) for o in self.optimizers])

    def do_read_model(self, op: Op) -> None:
        self._wait()
        self.see("whole model", [zero_optim.full_model_state_dict(model, rank=None) for model in self.models])

    def do_save_state(self, op: Op) -> None:
        state = [o.state_dict() for o in self.optimizers]
        model = [copy.deepcopy(m.state_dict()) for m in self.models]
        state = _through_a_file(state) if op.get("how") == "file" else copy.deepcopy(state)
        self.saved["state", op.get("slot", 0)] = (state, model)

    def do_load_state(self, op: Op) -> None:
        if kept := self.saved.get(("state", op.get("slot", 0))):
            self._zero("opt")
            if op.get("model_too"):
                self._load_models(kept[1])
            for optimizer, state in zip(self.optimizers, copy.deepcopy(kept[0]), strict=True):
                optimizer.load_state_dict(state)

    def do_save_full(self, op: Op) -> None:
        self.saved["full", op.get("slot", 0)] = [zero_optim.full_state_dict(o) for o in self.optimizers]

    def do_load_full(self, op: Op) -> None:
        if kept := self.saved.get(("full", op.get("slot", 0))):
            self._zero("opt")
            for optimizer, state in zip(self.optimizers, copy.deepcopy(kept), strict=True):
                zero_optim.load_full_state_dict(optimizer, state if self.rank == 0 else None)

    def do_save_model(self, op: Op) -> None:
        self.saved["model", op.get("slot", 0)] = [copy.deepcopy(m.state_dict()) for m in self.models]

    def do_load_model(self, op: Op) -> None:
        if kept := self.saved.get(("model", op.get("slot", 0))):
            self._zero(op.get("zero", "none"))
            self._load_models(kept)

    def _load_models(self, states: list[Any]) -> None:
        for model, state in zip(self.models, states, strict=True):
            model.load_state_dict(state)

    def do_save_checkpoint(self, op: Op) -> None:
        slot = op.get("slot", 0)
        kept, background = f"{self.folder}/slot-{slot}", bool(op.get("background"))
        checkpoint.save(kept, nn.ModuleList(self.models), self.optimizers, step=slot, background=background)
        self.saved["checkpoint", slot] = True

    def do_load_checkpoint(self, op: Op) -> None:
        slot = op.get("slot", 0)
        if self.saved.get(("checkpoint", slot)):
            self._zero("opt")
            loaded = checkpoint.load(f"{self.folder}/slot-{slot}", nn.ModuleList(self.models), self.optimizers)
            self.see("checkpoint", loaded.step)

    def do_remake(self, op: Op) -> None:
        """Close the optimizers and make others, with the next store, which may go on from the state of these."""
        carry = op.get("carry", "nothing")
        self._zero(op.get("zero", "opt"))
        slot = {"op": "save", "slot": 9, "how": op.get("how")}
        if carry != "nothing":
            getattr(self, f"do_save_{carry}")(slot)
        self._wait()
        self._close()
        self.stage = op.get("stage", self.stage) if self.stage < 3 else 3
        self.zeros_since_step = self.rounds_since_step = 0
        self._make_optimizers()
        if carry != "nothing":
            getattr(self, f"do_load_{carry}")(slot)


def _by_name(state: dict[str, Any]) -> dict[str, Any]:
    return {"state": dict(sorted(state["state"].items(), key=str)), "param_groups": state["param_groups"]}


def _edit(parameter: Tensor, how: str) -> None:
    if how == "mul":
        parameter.mul_(1.01)
    elif how == "copy":
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    elif how == "zero":
        parameter.zero_()
    else:
        parameter.add_(math.pi / 100)


def _through_a_file(state: Any) -> Any:
    memory = io.BytesIO()
    torch.save(state, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=True)
