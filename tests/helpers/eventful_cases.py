"""A training in which all happens that a topology has to bear, on ranks and in one process: for tests of every room.

In the step ``OVERFLOW`` one rank has a gradient that is not finite; in ``ABSENT`` some parameters have no part; after
``SAVED`` the training is saved, and another optimizer goes on from there. Every step is clipped, each by another norm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import oracle_float64
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

STEPS, OVERFLOW, ABSENT, SAVED = 6, 1, 2, 3
NORMS = ((2.0, 0.1), (2.0, 0.1), (3.0, 0.05), (math.inf, 0.01), (1.0, 0.5), (2.0, 0.02))
"""Of each step the norm's type, and what it is clipped to."""
HYPER = {"lr": 1e-2, "weight_decay": 0.1}
OF_VECTORS = {"lr": 5e-3, "weight_decay": 0.0}  # as a rule biases and norms do not decay
SCALE = 2.0**10
Scaled = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Job:
    """What a rank trains.

    Attributes:
        backwards: makes the gradients of a step, of an optimizer. What it is given multiplies a loss.
        given: options of the optimizer, and of ``shard_module`` at stage 3, which has ``units``.
        options: further ones of the optimizer.
        experts: of ``shard_module``.
        groups: of the optimizer, with names; None: one, of all parameters as the model orders them.
        shards: over how many ranks a parameter of that name is sharded.
        folder: below that of checkpoints.
        spread: whether ranks have parameters of the same name that are not the same.
    """

    model: nn.Module
    backwards: Callable[[Any, int, Scaled], None]
    given: Mapping[str, Any] = field(default_factory=dict)
    units: tuple[type[nn.Module], ...] = (nn.Linear,)
    options: Mapping[str, Any] = field(default_factory=dict)
    experts: Mapping[str, Any] | None = None
    groups: Sequence[dict[str, Any]] | None = None
    shards: Callable[[str], int] = lambda name: 1
    folder: str = ""
    spread: bool = False

    def groups_at(self, stage: int) -> Sequence[dict[str, Any]]:
        """Shard the model at stage 3, and give the optimizer's groups."""
        import zero_optim

        if stage == 3:
            zero_optim.shard_module(self.model, self.units, **self.given, experts=self.experts)
        return [{"params": [*self.model.named_parameters()]}] if self.groups is None else self.groups

    def wholes(self) -> dict[str, Tensor]:
        """Collective. Of a job that is ``spread`` what this rank has."""
        import zero_optim

        if not self.spread:
            return {name: whole.clone() for name, whole in zero_optim.iter_full_parameters(self.model)}
        with zero_optim.gather_parameters(self.model):
            return {name: whole.detach().clone() for name, whole in self.model.named_parameters()}


@dataclass(frozen=True)
class Outcome:
    """What a rank has found.

    Attributes:
        state: full, by parameter.
        resumed: names of parameters of the optimizer that went on from what was saved, whose bits differ in the end.
        scale: of losses, where they were scaled.
        report: what is wrong with updates, where they were compared with those in float64.
        updated: how many elements a step updates, as this rank's part of what all report.
    """

    parameters: Mapping[str, Tensor]
    state: Mapping[str, Mapping[str, Tensor]]
    norms: Sequence[float]
    skipped: int
    resumed: Sequence[str]
    scale: float
    report: oracle_float64.Report
    updated: float


# -- rules -------------------------------------------------------------------------------------------------------------


def adamw(groups: Sequence[dict[str, Any]], **options: Any) -> Any:
    """Vectors are in groups of their own."""
    import zero_optim

    made = []
    for group in groups:
        made.append({**group, "params": [entry for entry in group["params"] if entry[1].dim() > 1]})
        made.append({**group, "params": [entry for entry in group["params"] if entry[1].dim() < 2], **OF_VECTORS})
    return zero_optim.ShardedAdamW([group for group in made if group["params"]], **HYPER, **options)


def mixed(groups: Sequence[dict[str, Any]], **options: Any) -> Any:
    """Matrices are Muon's; of the others every second one is AdamW's, and the rest is Lion's."""
    import zero_optim
    from zero_optim import rules

    made = []
    for group in groups:
        matrices = [entry for entry in group["params"] if entry[1].dim() > 1]
        others = [entry for entry in group["params"] if entry[1].dim() < 2]
        made.append({**group, "params": matrices})
        made.append({**group, "params": others[0::2], "rule": rules.AdamW(lr=1e-2), "weight_decay": 0.3})
        made.append({**group, "params": others[1::2], "rule": rules.Lion(lr=1e-3)})
    made = [group for group in made if group["params"]]
    return zero_optim.ShardedMuon(made, lr=0.02, bucket_cap_mb=0.002, **options)


RULES = {"AdamW": (torch.float32, adamw), "Muon, AdamW and Lion": (torch.bfloat16, mixed)}
"""The parameters' dtype, and how an optimizer is made of groups."""


# -- on ranks ----------------------------------------------------------------------------------------------------------


def train(make: Callable[[torch.dtype], Job], rule: str, stage: int, folder: str) -> Outcome:
    """``make``: what this rank trains. At odd stages losses are scaled. The optimizer that goes on from the checkpoint
    has its state off the device."""
    import zero_optim

    dtype, optimizer = RULES[rule]

    def build(**options: Any) -> tuple[Job, Any, Any]:
        job = make(dtype)
        opt = optimizer(job.groups_at(stage), stage=stage, **job.given, **job.options, **options)
        scaler = zero_optim.GradScaler(init_scale=SCALE, growth_interval=100) if stage % 2 else None
        return job, opt, scaler

    job = make(dtype)
    trained = [(name, p) for name, p in job.model.named_parameters() if p.requires_grad]
    updated = sum(local(p).numel() / (job.shards(name) if stage else 1) for name, p in trained)
    job, opt, scaler = build()
    norms, saved = [], None
    with oracle_float64.watch(opt) as watching:
        for step in range(STEPS):
            norms.append(_step(job, opt, scaler, step))
            if step == SAVED:
                saved = _save(job, opt, f"{folder}/{job.folder}", step)
        report = watching.report()
    names = [name for group in opt.param_groups for name in group["param_names"]]
    whole = {} if job.spread else zero_optim.full_state_dict(opt, rank=None)["state"]
    state = {names[index]: entry for index, entry in whole.items()}
    parameters, skipped = job.wholes(), opt.stats()["skipped_steps"]
    scale = SCALE / 2 if scaler is None else scaler.get_scale()
    opt.close()
    job, opt, scaler = build(state_offload="cpu")
    _load(job, opt, f"{folder}/{job.folder}", saved)
    for step in range(SAVED + 1, STEPS):
        _step(job, opt, scaler, step)
    resumed = [name for name, value in job.wholes().items() if not torch.equal(value, parameters[name])]
    opt.close()
    return Outcome(parameters, state, norms, skipped, resumed, scale, report, updated)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _step(job: Job, opt: Any, scaler: Any, step: int) -> float:
    """The norm before it was clipped."""
    norm_type, limit = NORMS[step]
    job.backwards(opt, step, (lambda loss: loss) if scaler is None else scaler.scale)
    if scaler is not None:
        scaler.unscale_(opt)
    norm = float(opt.clip_grad_norm_(limit, norm_type))
    opt.step() if scaler is None else scaler.step(opt)
    if scaler is not None:
        scaler.update()
    opt.zero_grad()
    return norm


def _save(job: Job, opt: Any, folder: str, step: int) -> Any:
    import zero_optim

    if job.spread:
        return copy.deepcopy(opt.state_dict()), job.wholes()
    zero_optim.checkpoint.save(folder, job.model, opt, step=step)
    return None


def _load(job: Job, opt: Any, folder: str, saved: Any) -> None:
    import zero_optim

    if saved is None:
        zero_optim.checkpoint.load(folder, job.model, opt)
        return
    with torch.no_grad():
        for name, parameter in job.model.named_parameters():
            parameter.copy_(saved[1][name])
    opt.load_state_dict(saved[0])


# -- in one process ----------------------------------------------------------------------------------------------------


def torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is of] for of in (True, False))
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, **OF_VECTORS}], **HYPER)


def assert_as_in_one_process(
    outcomes: Sequence[Outcome],
    model: nn.Module,
    backwards: Callable[[int], None],
    tolerance: float,
    part: Callable[[int, str], tuple[str, Callable[[Tensor], Tensor]]],
) -> None:
    """By ``torch.optim.AdamW``, of ``model`` in whole.

    ``part``: of a rank's parameter, the name in one process, and what the rank has of it, or of its state.
    """
    norms = []
    opt = torch_adamw(model)
    for step, (norm_type, limit) in enumerate(NORMS):
        if step == OVERFLOW:
            continue
        backwards(step)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)))
        assert norms[-1] > limit, "each step is clipped"
        opt.step()
        opt.zero_grad()
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    state = {name: opt.state[p] for name, p in model.named_parameters() if p in opt.state}
    seen = set()
    for rank, found in enumerate(outcomes):
        for name, value in found.parameters.items():
            whole, of = part(rank, name)
            seen.add(whole)
            close = {"rtol": 10 * tolerance, "atol": tolerance, "msg": lambda text, name=name: f"{name}: {text}"}
            torch.testing.assert_close(value, of(parameters[whole]), **close)
        assert found.state.keys() in (set(), found.parameters.keys() & state.keys())
        for name, entry in found.state.items():
            whole, of = part(rank, name)
            for kind, value in state[whole].items():
                wanted = value if kind == "step" else of(value)
                torch.testing.assert_close(entry[kind], wanted, rtol=50 * tolerance, atol=tolerance)
        finite = [norm for step, norm in enumerate(found.norms) if step != OVERFLOW]
        assert finite == pytest.approx(norms, rel=5 * tolerance)
    assert seen == parameters.keys()


def assert_first_norm(
    outcomes: Sequence[Outcome], model: nn.Module, backwards: Callable[[int], None], tolerance: float
) -> None:
    """That of the whole model, by whatever rules it is updated."""
    backwards(0)
    norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], NORMS[0][0]))
    assert [found.norms[0] for found in outcomes] == pytest.approx([norm] * len(outcomes), rel=tolerance)


def assert_each_update_is_exact(outcomes: Sequence[Outcome], together: int, *, matrices: bool) -> None:
    """``together``: how many ranks report together; they update each element as often as it is held."""
    for rank, found in enumerate(outcomes):
        first = rank // together * together
        assert found.report == outcomes[first].report
        assert found.report.compared == STEPS * sum(one.updated for one in outcomes[first:][:together])
        assert found.report.elements.of_bound <= 1 and found.report.unrounded == 0, found.report
        if matrices:
            assert found.report.matrices is not None and 0 < found.report.matrices.of_bound < 1, found.report


def assert_went_well(outcomes: Sequence[Outcome]) -> None:
    """One step was skipped, on all ranks; a norm is the same on all; who went on from the checkpoint has the bits."""
    for found in outcomes:
        assert found.skipped == 1 and not math.isfinite(found.norms[OVERFLOW])
        assert found.scale == SCALE / 2
        assert [norm for norm in found.norms if math.isfinite(norm)] == [
            norm for norm in outcomes[0].norms if math.isfinite(norm)
        ]
        assert found.resumed == []


# -- a model whose ranks have the same parameters, each with data of its own -------------------------------------------

WIDTH, MICRO = 12, 2
Data = Callable[[int, int], Tensor]
"""[rows, WIDTH] fp32, of a step and a micro-batch."""


class Net(nn.Module):
    """A bias is frozen, and the layer in the middle can be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, 20), nn.Linear(20, 20), nn.Linear(20, WIDTH)
        self.last.bias.requires_grad_(False)

    def forward(self, x: Tensor, *, short: bool) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(x if short else torch.tanh(self.middle(x)))


def loss_of(model: nn.Module, data: Data, step: int, micro: int) -> Tensor:
    return model(data(step, micro), short=step == ABSENT).square().mean()
