"""``zero-optim plan``: what its flags mean, and what it prints."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import UsageError
from ..figures import row, size
from ..rules.codec import DTYPES, codecs_for, default_master
from ..rules.kernel_rule import SGD, AdamW, Lion
from ..rules.muon import Muon
from ..rules.options import Decays
from ..rules.update_rule import UpdateRule
from ..stores.offload import Offload, Tier, read_offload
from .models import KNOWN, ModelShapes, gpt_of, of_decoder, of_module, usual_units, with_lora
from .plan import Batch, Job, Plan, plan
from .report import memory_lines, ranks_of, unit_of, verdict

RULES = {"adamw": AdamW(), "amsgrad": AdamW(amsgrad=True), "lion": Lion(), "sgd": SGD(), "momentum": SGD(momentum=0.9)}
STAGES = (0, 1, 2, 3)
_FLAGS = {  # by fields of ``Job``
    "world": "--world",
    "tensor": "--tp",
    "expert_parallel": "--ep",
    "pipeline": "--pp",
    "replicas": "--replicate",
}


def run(parsed: argparse.Namespace) -> int:
    """Print the plans. Raises UsageError."""
    _check(parsed)
    model = _model(parsed)
    if parsed.param_offload and 3 not in (parsed.stage or STAGES):
        raise UsageError("--param-offload: is about stage 3 alone, which is not compared; see --stage")
    stages = parsed.stage or (STAGES if model.units else STAGES[:3])
    if 3 in stages and not model.units:
        raise UsageError("--stage 3: the model has no ModuleList of layers, which stage 3 gathers one at a time")
    try:
        plans = [plan(model, _job(parsed, stage)) for stage in stages]
    except ValueError as error:
        field, _, rest = str(error).partition(" ")
        raise UsageError(f"{_FLAGS.get(field, field)} {rest}") from error
    if parsed.json:
        print(json.dumps([_as_json(made, parsed) for made in plans], indent=1))
    else:
        print("\n".join(_report(parsed, plans)))
    return 0


def _check(parsed: argparse.Namespace) -> None:
    """Raise UsageError for flags that do not go together, or that would change nothing."""
    for name in ("seq", "batch", "accumulate", "lora", "averages"):
        given, least = getattr(parsed, name), int(name != "averages")
        if given is not None and given < least:
            raise UsageError(f"--{name} {given}: at least {least}")
    if parsed.master in ("split", "split8") and parsed.dtype in ("fp16", "fp32"):
        raise UsageError(f"--master {parsed.master}: a part of it is the bf16 parameter, and --dtype is {parsed.dtype}")
    if (parsed.seq is None) != (parsed.batch is None):
        raise UsageError("--seq and --batch: activations need both")
    if parsed.state_over == "all" and parsed.replicate == 1:
        raise UsageError("--state-over all: changes nothing without replicas, see --replicate")
    if parsed.checkpointing and parsed.batch is None:
        raise UsageError("--checkpointing: changes activations alone, which need --seq and --batch")


def _job(parsed: argparse.Namespace, stage: int) -> Job:
    def formed(rule: UpdateRule) -> UpdateRule:
        master = parsed.master or default_master([DTYPES[parsed.dtype or "bf16"]])
        rule = rule.with_codecs(codecs_for(rule.tensors, rule.nonnegative, master, parsed.state_dtype))
        return rule.with_averages(Decays("ema_decay", (1.0,) * parsed.averages))

    kind, _, budget = parsed.offload.partition(":")  # the command line has checked it
    if kind == "nvme":
        offload = Offload(Tier.NVME)  # a plan needs no folder
    else:
        offload = read_offload(None if kind == "none" else kind, int(budget) if budget.isdecimal() else budget or None)
    batch = None if parsed.batch is None else Batch(parsed.batch, parsed.seq, parsed.checkpointing)
    return Job(
        world=parsed.world,
        replicas=parsed.replicate,
        state_over=parsed.state_over,
        tensor=parsed.tp,
        expert_parallel=parsed.ep,
        pipeline=parsed.pp,
        stage=stage,
        grad_reduce_dtype=DTYPES[parsed.grad_reduce_dtype] if parsed.grad_reduce_dtype else None,
        offload=offload,
        param_offload=parsed.param_offload,
        device_memory=parsed.gpu_memory,
        accumulate=parsed.accumulate or parsed.pp,
        batch=batch,
        rule=formed(RULES.get(parsed.optimizer, AdamW())),
        matrix_rule=formed(Muon()) if parsed.optimizer == "muon" else None,
    )


def _model(parsed: argparse.Namespace) -> ModelShapes:
    """Find the model, and freeze what is not trained by ``--lora``."""
    dtype, name = DTYPES[parsed.dtype or "bf16"], parsed.model
    if parsed.params is not None:
        model = of_decoder(gpt_of(parsed.params), dtype)
    elif name.lower() in KNOWN:
        model = of_decoder(KNOWN[name.lower()], dtype)
    elif name.endswith(".json") or Path(name).is_dir():
        module = _from_config(Path(name)).to(dtype)
        model = of_module(module, usual_units(module), name)
    else:
        near = difflib.get_close_matches(name.lower(), KNOWN, 1)
        meant = f"did you mean {near[0]}?" if near else f"it knows {', '.join(KNOWN)}."
        raise UsageError(
            f"--model {name}: no name that it knows; {meant} Of any other model download its config.json and give "
            "the path, or call zero_optim.memory.plan"
        )
    try:
        return model if parsed.lora is None else with_lora(model, parsed.lora)
    except ValueError as error:
        raise UsageError(f"--lora {parsed.lora}: {error}") from error


def _from_config(path: Path) -> nn.Module:
    """Make a model of transformers on the meta device, from a config.json or its folder. Nothing is downloaded."""
    if not path.exists():
        raise UsageError(f"--model {path}: no such file or folder")
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError as error:
        raise UsageError(f"--model {path}: needs transformers ({error}): pip install transformers") from error
    try:
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
        kind = AutoModelForCausalLM if type(config) in AutoModelForCausalLM._model_mapping else AutoModel
        with torch.device("meta"):
            model: nn.Module = kind.from_config(config)
    except Exception as error:
        raise UsageError(f"--model {path}: {type(error).__name__}: {error}") from error
    return model


def _report(parsed: argparse.Namespace, plans: Sequence[Plan]) -> Iterator[str]:
    model, room, unit = plans[0].model, parsed.gpu_memory, unit_of(plans)
    trained = sum(p.numel for p in model.parameters if p.trained)
    shape = f" ({trained:,} trained)" * (trained != model.numel)
    shape += f", {model.width.layers} layers of width {model.width.hidden:,}" if model.width else ""
    yield f"{model.name}: {model.numel:,} parameters{shape}; {ranks_of(plans[0].job)}; {unit.name} a rank"
    yield verdict(plans, room)
    if parsed.batch is not None:
        again = ", recomputed in backward" if parsed.checkpointing else ""
        yield f"Activations: {parsed.batch} x {parsed.seq:,} tokens{again}, by Korthikanti et al. (2022)."
    uncounted = "activations (--seq and --batch count them), " if parsed.batch is None else ""
    yield f"Not counted: {uncounted}CUDA's context and NCCL's communicators."
    yield ""
    yield row("", [f"stage {made.job.stage}" for made in plans])
    if parsed.pp > 1:
        yield row("stage of the pipeline", [f"{made.pipeline_stage + 1} of {parsed.pp}" for made in plans])
    yield from memory_lines(plans, unit, by_kind=parsed.verbose)
    yield row(f"fits into {size(room)}", ["yes" if made.most <= room else "no" for made in plans])
    yield row("NCCL communicators", [str(made.communicators) for made in plans])
    if parsed.verbose:
        yield row("buckets", [f"{made.buckets:,}" for made in plans])
        yield row("collectives of a step", [f"{sum(made.calls.values()):,}" for made in plans])
    if any(made.first_step for made in plans):
        yield "\nIn the first step of stage 0 no gradient is reduced before backward ends."
    total = {made.job.stage: made.total for made in plans}
    if plans[0].job.adds_up and 1 in total and total.get(2, 0) > total[1]:
        yield "\nStage 2 takes more than stage 1: gradients of micro-batches add up whole, beside their shard."
    if not parsed.verbose:
        yield "\n--verbose: what it is made of, by kind; buckets, collectives"


def _as_json(made: Plan, parsed: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": made.model.name,
        "parameters": made.model.numel,
        "trained_parameters": sum(p.numel for p in made.model.parameters if p.trained),
        "stage": made.job.stage,
        "world": made.job.world,
        "tensor_parallel": made.job.tensor,
        "expert_parallel": made.job.expert_parallel,
        "pipeline": made.job.pipeline,
        "pipeline_stage": made.pipeline_stage,
        "replicas": made.job.replicas,
        "state_over": made.job.state_over,
        "bytes_per_rank": dict(made.memory),
        "total_bytes": made.total,
        "model_state_bytes": made.model_state,
        "first_step_bytes": made.most,
        "collectives": dict(made.traffic),
        "collective_calls": dict(made.calls),
        "host_bytes": made.host,
        "disk_bytes": made.disk,
        "buckets": made.buckets,
        "nccl_communicators": made.communicators,
        "fits": made.most <= parsed.gpu_memory,
    }
