"""``zero-optim plan``: its flags, and what it prints."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from zero_optim_cli.choices import MUON

from ..drawing.figures import SizeUnit, row, size
from ..errors import ParameterError, UsageError
from ..rules.adamw import AdamW
from ..rules.codec import AVERAGES, codecs_for
from ..rules.lion import Lion
from ..rules.muon import Muon
from ..rules.options import Decays
from ..rules.sgd import SGD
from ..rules.update_rule import UpdateRule
from ..stores.offload import Offload, Tier, read_offload
from ..train.config import DTYPES
from .activations import Batch
from .decoders import KNOWN, gpt_of
from .fit import largest_model, smallest_stage
from .plan import Job, Plan, plan
from .shapes import ModelShapes, of_decoder, of_module, usual_units, with_lora, with_trained_part
from .table import memory_lines, ranks_of, unit_of, verdict

_NO_FOLDER = (FileNotFoundError, NotADirectoryError)

RULES = {
    "adamw": AdamW(),
    "amsgrad": AdamW(amsgrad=True),
    "lion": Lion(),
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9),
}
STAGES = (0, 1, 2, 3)
_OF_STAGE_3 = ("param_offload", "units", "prefetch")  # flags, by their names in Python


def run(parsed: argparse.Namespace) -> int:
    """Print the plans. Raises UsageError."""
    parsed.offload = _offload(parsed.offload)
    _check_ranges(parsed)
    whole, dtype = _model(parsed)
    change = partial(_with_trained, parsed.lora, _part(parsed.trainable, whole))
    model = change(whole)
    _check_layers(parsed, model)
    stages = _stages_of(parsed, model)
    _check_stages(parsed, stages)
    plans = [_plan(model, _job(parsed, stage)) for stage in stages]
    if parsed.nodes is not None and not any(made.host or made.disk for made in plans):
        raise UsageError(
            "--nodes: says what a machine takes of host memory and disk: nothing, without --offload or --param-offload"
        )
    largest = [0] * len(plans)
    if parsed.verbose or parsed.json:
        largest = [largest_model(made.job, dtype, parsed.gpu_memory, change) for made in plans]
    if parsed.png:
        _draw(parsed, plans)
    if parsed.json:
        described = zip(plans, largest, strict=True)
        print(json.dumps([_as_json(made, most, parsed) for made, most in described], indent=1))
    else:
        print("\n".join(_report(parsed, plans, largest)))
        if parsed.png:
            print(f"drawn in {parsed.png}")
    return 0


# -- the flags -----------------------------------------------------------------------------------------------------


def _offload(text: str) -> Offload:
    """Read ``--offload``, which the command line has checked. Of ``nvme`` a plan needs no folder."""
    kind, _, budget = text.partition(":")
    if kind == "nvme":
        return Offload(Tier.NVME)
    return read_offload(None if kind == "none" else kind, int(budget) if budget.isdecimal() else budget or None)


def _check_ranges(parsed: argparse.Namespace) -> None:
    least = {
        "world": 1,
        "tp": 1,
        "pp": 1,
        "replicate": 1,
        "nodes": 1,
        "seq": 1,
        "batch": 1,
        "accumulate": 1,
        "prefetch": 0,
        "rank": 0,
        "averages": 0,
        "lora": 1,
    }
    for name, lowest in least.items():
        if getattr(parsed, name) is not None and getattr(parsed, name) < lowest:
            raise UsageError(f"--{name} {getattr(parsed, name)}: at least {lowest}")
    if parsed.world % parsed.tp:
        raise UsageError(f"--tp {parsed.tp}: a divisor of the {parsed.world} ranks of --world")
    if parsed.world // parsed.tp % parsed.pp:
        raise UsageError(f"--pp {parsed.pp}: a divisor of {parsed.world // parsed.tp}, the ranks of --world over --tp")
    if parsed.master != "fp32" and parsed.dtype in ("fp16", "fp32"):
        raise UsageError(f"--master {parsed.master}: a part of it is the bf16 parameter, and --dtype is {parsed.dtype}")
    if parsed.ema_dtype != "fp32" and parsed.averages == 0:
        raise UsageError(f"--ema-dtype {parsed.ema_dtype}: no average is kept: give --averages, too")
    data = parsed.world // (parsed.tp * parsed.pp)
    cut = [what for what, ranks in (("slices", parsed.tp), ("stage", parsed.pp)) if ranks > 1]
    alike = f" that have the same {' and '.join(cut)}" if cut else ""
    if parsed.rank is not None and parsed.rank >= data:
        raise UsageError(f"--rank {parsed.rank}: ranks{alike} are 0 to {data - 1}")
    if data % parsed.replicate or parsed.replicate == data > 1:
        raise UsageError(
            f"--replicate {parsed.replicate}: a divisor of the {data} ranks{alike}, less than all: the others share"
        )
    if parsed.nodes is not None and parsed.world % parsed.nodes:
        raise UsageError(f"--nodes {parsed.nodes}: {parsed.world} ranks do not share them evenly")
    if (parsed.seq is None) != (parsed.batch is None):
        raise UsageError("--seq and --batch: activations need both")
    if parsed.optimizer == MUON and parsed.tp > 1 and parsed.offload.tier is not Tier.DEVICE:
        raise UsageError(
            f"--optimizer muon: makes matrices whole on the device, which --tp {parsed.tp} cuts; leave out --offload"
        )
    if parsed.verbose and parsed.json:
        raise UsageError("--verbose: --json has all of it; leave one of them out")
    for name in ("checkpointing", "no_flash"):
        if getattr(parsed, name) and parsed.batch is None:
            raise UsageError(f"{_flag(name)}: changes activations alone, which need --seq and --batch")
    if parsed.bucket_cap_mb is not None and not 0 < parsed.bucket_cap_mb < math.inf:
        raise UsageError(f"--bucket-cap-mb {parsed.bucket_cap_mb}: a positive number")
    if parsed.units is not None and (parsed.params is not None or parsed.model in KNOWN):
        raise UsageError(f"--units {parsed.units}: the units of this model are its blocks; leave the flag out")
    for name in ("grad_reduce_dtype", "grad_accumulation_dtype", "prefetch"):
        if getattr(parsed, name) is not None and parsed.world == 1:
            raise UsageError(
                f"{_flag(name)} {getattr(parsed, name)}: one rank neither reduces nor gathers; see --world"
            )


def _check_layers(parsed: argparse.Namespace, model: ModelShapes) -> None:
    """Raise UsageError where the model has no layer for each stage of a pipeline."""
    layers = len(model.units) - 1
    if parsed.pp > 1 and not model.units:
        raise UsageError(f"--pp {parsed.pp}: name the class of the model's layers by --units; it has no ModuleList")
    if parsed.pp > max(layers, 1):
        raise UsageError(f"--pp {parsed.pp}: at most {layers}, the layers of the model: each stage has one or more")


def _check_stages(parsed: argparse.Namespace, stages: Sequence[int]) -> None:
    """Raise UsageError for a flag that is about none of ``stages``."""
    given = [name for name in _OF_STAGE_3 if getattr(parsed, name) is not None and getattr(parsed, name) is not False]
    given = [name for name in given if not (name == "units" and parsed.pp > 1)]  # stages are cut by units
    for name in given if 3 not in stages else []:
        raise UsageError(f"{_flag(name)}: is about stage 3 alone, which is not compared; see --stage")
    if parsed.bucket_cap_mb is not None and tuple(stages) == (3,):
        raise UsageError("--bucket-cap-mb: is about stages 0 to 2; at stage 3 a bucket is what a unit has; see --stage")
    if parsed.optimizer == MUON and 3 in stages and (parsed.offload.tier is not Tier.DEVICE or parsed.param_offload):
        raise UsageError(
            "--optimizer muon: at stage 3 state and parameters stay on the device; leave out --offload and "
            "--param-offload, or compare --stage 0,1,2"
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _formed(rule: UpdateRule, parsed: argparse.Namespace) -> UpdateRule:
    """Give the rule with the form of state, and the averages, that were asked for."""
    rule = rule.with_codecs(codecs_for(rule.tensors, rule.nonnegative, parsed.master, parsed.state_dtype))
    return rule.with_averages(Decays("ema_decay", (1.0,) * parsed.averages), AVERAGES[parsed.ema_dtype])


def _job(parsed: argparse.Namespace, stage: int) -> Job:
    batch = None
    if parsed.batch is not None:
        batch = Batch(parsed.batch, parsed.seq, parsed.checkpointing, not parsed.no_flash)
    return Job(
        world=parsed.world,
        replicas=parsed.replicate,
        tensor=parsed.tp,
        pipeline=parsed.pp,
        stage=stage,
        rank=parsed.rank,
        bucket_cap_mb=parsed.bucket_cap_mb,
        grad_reduce_dtype=DTYPES[parsed.grad_reduce_dtype] if parsed.grad_reduce_dtype else None,
        grad_accumulation_dtype=DTYPES[parsed.grad_accumulation_dtype] if parsed.grad_accumulation_dtype else None,
        offload=parsed.offload,
        param_offload=parsed.param_offload,
        device_memory=parsed.gpu_memory,
        prefetch=1 if parsed.prefetch is None else parsed.prefetch,
        accumulate=parsed.accumulate or parsed.pp,
        batch=batch,
        rule=_formed(RULES.get(parsed.optimizer, AdamW()), parsed),
        matrix_rule=_formed(Muon(), parsed) if parsed.optimizer == MUON else None,
        telemetry=parsed.telemetry,
    )


def _plan(model: ModelShapes, job: Job) -> Plan:
    try:
        return plan(model, job)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _stages_of(parsed: argparse.Namespace, model: ModelShapes) -> tuple[int, ...]:
    """Choose the stages that were asked for; else all that there are of the model."""
    if parsed.stage is None:
        return STAGES if model.units else STAGES[:3]
    if 3 in parsed.stage and not model.units:
        raise UsageError("--stage 3: name the class of the model's units by --units; it has no ModuleList to go by")
    return tuple(parsed.stage)


# -- the model -----------------------------------------------------------------------------------------------------


def _model(parsed: argparse.Namespace) -> tuple[ModelShapes, torch.dtype]:
    """Give the model's shapes, and the dtype for ``largest_model``."""
    dtype = DTYPES[parsed.dtype or "bf16"]
    if parsed.params is not None:
        return of_decoder(gpt_of(parsed.params), dtype), dtype
    name = parsed.model
    if name.lower() in KNOWN:
        return of_decoder(KNOWN[name.lower()], dtype), dtype
    if name.endswith(".json") or Path(name).is_dir():
        return _shapes(parsed, _from_config(Path(name)).to(dtype)), dtype
    if ":" in name:
        model = _from_factory(name)
        shapes = _shapes(parsed, model.to(dtype) if parsed.dtype else model)
        return shapes, max((p.dtype for p in shapes.parameters), key=lambda of: of.itemsize, default=dtype)
    near = difflib.get_close_matches(name.lower(), KNOWN, 1)
    meant = f"did you mean {near[0]}?" if near else f"it knows {', '.join(KNOWN)}."
    raise UsageError(
        f"--model {name}: no name that it knows; {meant} Of any other model download its config.json and give "
        "the path, or give a module:factory"
    )


def _part(trainable: Fraction | int | None, model: ModelShapes) -> Fraction | None:
    """Read ``--trainable``: a part, or a number of parameters."""
    if trainable is None or isinstance(trainable, Fraction):
        return trainable
    if trainable > model.numel:
        raise UsageError(f"--trainable {trainable:,}: the model has {model.numel:,} parameters")
    return Fraction(trainable, model.numel)


def _with_trained(lora: int | None, part: Fraction | None, model: ModelShapes) -> ModelShapes:
    """Freeze what is not trained by ``--lora`` or ``--trainable``."""
    if part is not None:
        return with_trained_part(model, part)
    try:
        return model if lora is None else with_lora(model, lora)
    except ValueError as error:
        raise UsageError(f"--lora {lora}: {error}") from error


def _shapes(parsed: argparse.Namespace, model: nn.Module) -> ModelShapes:
    units = parsed.units.split(",") if parsed.units else usual_units(model)
    try:
        return of_module(model, units, parsed.model)
    except ParameterError as error:
        raise UsageError(f"--units {parsed.units}: {error}") from error


def _from_factory(name: str) -> nn.Module:
    """Make what ``module:factory`` gives on the meta device. Modules of the current folder are found."""
    module, _, factory = name.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make: Any = importlib.import_module(module)
        for attribute in factory.split("."):
            make = getattr(make, attribute)
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise UsageError(f"--model {name}: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name}: it gave {type(model).__name__}, and no module")
    return model


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


# -- what is said --------------------------------------------------------------------------------------------------


def _report(parsed: argparse.Namespace, plans: Sequence[Plan], largest: Sequence[int]) -> Iterator[str]:
    model, room = plans[0].model, parsed.gpu_memory
    width, unit = model.width, unit_of(plans)
    trained = sum(p.numel for p in model.parameters if p.trained)
    shape = f", {width.layers} layers of width {width.hidden:,}" if width else ""
    shape = f" ({trained:,} trained)" * (trained != model.numel) + shape
    which = "the mean of all ranks" if parsed.rank is None else f"rank {parsed.rank}"
    yield f"{model.name}: {model.numel:,} parameters{shape}; {ranks_of(plans[0].job)}; {unit.name} a rank, {which}"
    yield from _verdict(parsed, plans)
    yield ""
    yield row("", [f"stage {made.job.stage}" for made in plans])
    if parsed.pp > 1:
        yield row("stage of the pipeline", [f"{made.pipeline_stage + 1} of {parsed.pp}" for made in plans])
    yield from memory_lines(plans, unit, by_kind=parsed.verbose)
    yield row(f"fits into {size(room)}", ["yes" if made.most <= room else "no" for made in plans])
    if parsed.verbose:
        yield from _details(parsed, plans, largest, unit)
    if notes := [*_notes(parsed, plans)]:
        yield from ("", *notes)


def _verdict(parsed: argparse.Namespace, plans: Sequence[Plan]) -> Iterator[str]:
    """Say whether the job fits, at the first of the stages that were asked for, and what is not counted."""
    room, chosen = parsed.gpu_memory, plans[0]
    asked = None if parsed.stage is None else next((made for made in plans if made.most <= room), None)
    smallest = asked or smallest_stage(chosen.model, chosen.job, room)
    yield verdict(smallest, plans[-1], room)
    beside = "CUDA's context and NCCL's communicators"
    if parsed.batch is None:
        yield f"Not counted: activations (--seq and --batch count them), {beside}."
    else:
        yield from _about_activations(chosen)
        yield f"Not counted: {beside}."


def _details(
    parsed: argparse.Namespace, plans: Sequence[Plan], largest: Sequence[int], unit: SizeUnit
) -> Iterator[str]:
    yield row("asleep", [unit.cell(made.asleep) for made in plans])
    yield row("  with the parameters", [unit.cell(made.asleep_with_parameters) for made in plans])
    yield row("sent in a step", [unit.cell(made.communicated) for made in plans])
    yield from _by_link(parsed, plans, unit)
    yield row("buckets", [f"{made.buckets:,}" for made in plans])
    yield row(f"largest GPT in {size(parsed.gpu_memory)}", [_billions(most) for most in largest])


def _notes(parsed: argparse.Namespace, plans: Sequence[Plan]) -> Iterator[str]:
    if parsed.verbose and parsed.batch is None and (parsed.tp > 1 or parsed.pp > 1):
        yield "What is sent of activations, along slices and along the pipeline, is not counted either."
    if any(made.first_step for made in plans):
        yield "In the first step of stages 0 to 2 no gradient is reduced before backward ends."
    at = {made.job.stage: made for made in plans}
    if plans[0].job.adds_up and 1 in at and 2 in at and at[2].total > at[1].total:
        yield (
            "Stage 2 takes more than stage 1: the gradients of several micro-batches add up whole on each rank before "
            "they are reduced. Stage 1 has them in place, and stage 2 beside its shard."
        )
    if parsed.nodes is not None:
        yield from _of_nodes(parsed, plans)
    if not parsed.verbose:
        yield "--verbose: what it is made of, by kind; what is sent; asleep; buckets; the largest model that fits"


def _by_link(parsed: argparse.Namespace, plans: Sequence[Plan], unit: SizeUnit) -> Iterator[str]:
    """A line for each kind of link, where there are several."""
    links = [
        ("across replicas", parsed.replicate, [made.sent_across for made in plans]),
        ("along slices", parsed.tp, [made.sent_along_slices for made in plans]),
        ("along the pipeline", parsed.pp if parsed.batch else 1, [made.sent_along_pipeline for made in plans]),
    ]
    there = [(name, sent) for name, ranks, sent in links if ranks > 1]
    if there:
        yield row("  within a shard row", [unit.cell(made.sent_within) for made in plans])
    for name, sent in there:
        yield row(f"  {name}", [unit.cell(nbytes) for nbytes in sent])


def _billions(parameters: int) -> str:
    if not parameters:
        return "none"
    return f"{parameters / 1e12:.3g} T" if parameters >= 10**12 else f"{parameters / 1e9:.3g} B"


def _about_activations(made: Plan) -> Iterator[str]:
    batch = made.job.batch
    assert batch is not None
    again = ", each layer computed again in backward" if batch.checkpointing else ""
    how = "without" if batch.flash else "with"
    yield (
        f"Activations: {batch.sequences} x {batch.tokens:,} tokens, {how} the matrices of attention{again}, "
        "by the formula of Korthikanti et al. (2022)."
    )


def _of_nodes(parsed: argparse.Namespace, plans: Sequence[Plan]) -> Iterator[str]:
    ranks = parsed.world // parsed.nodes
    for made in plans:
        if made.host or made.disk:
            disk = f", {size(made.disk * ranks)} of disk" if made.disk else ""
            yield f"Stage {made.job.stage}: {size(made.host * ranks)} of host memory{disk} a node of {ranks} ranks."


def _as_json(made: Plan, largest: int, parsed: argparse.Namespace) -> dict[str, Any]:
    room, ranks = parsed.gpu_memory, parsed.world // (parsed.nodes or parsed.world)
    return {
        "model": made.model.name,
        "parameters": made.model.numel,
        "trained_parameters": sum(p.numel for p in made.model.parameters if p.trained),
        "stage": made.job.stage,
        "world": made.job.world,
        "tensor_parallel": made.job.tensor,
        "pipeline": made.job.pipeline,
        "pipeline_stage": made.pipeline_stage,
        "replicas": made.job.replicas,
        "rank": made.job.rank,
        "optimizer": parsed.optimizer,
        "bytes_per_rank": dict(made.memory),
        "total_bytes": made.total,
        "model_state_bytes": made.model_state,
        "first_step_bytes": made.most,
        "communicated_bytes": made.communicated,
        "communicated_within_bytes": made.sent_within,
        "communicated_across_bytes": made.sent_across,
        "communicated_along_slices_bytes": made.sent_along_slices,
        "communicated_along_pipeline_bytes": made.sent_along_pipeline,
        "collectives": dict(made.traffic),
        "asleep_bytes": made.asleep,
        "asleep_with_parameters_bytes": made.asleep_with_parameters,
        "host_bytes": made.host,
        "disk_bytes": made.disk,
        **({"node_host_bytes": made.host * ranks, "node_disk_bytes": made.disk * ranks} if parsed.nodes else {}),
        "buckets": made.buckets,
        "device_memory": room,
        "fits": made.most <= room,
        "largest_model": largest,
    }


def _draw(parsed: argparse.Namespace, plans: Sequence[Plan]) -> None:
    try:
        from .picture import draw
    except ImportError as error:
        raise UsageError(f"--png {parsed.png}: needs matplotlib ({error}): pip install matplotlib") from error
    try:
        draw(parsed.png, plans, parsed.gpu_memory)
    except OSError as error:
        where = ": give a file in a folder that is there" if isinstance(error, _NO_FOLDER) else ""
        raise UsageError(f"--png {parsed.png}: {error.strerror or error}{where}") from error
    except ValueError as error:
        raise UsageError(f"--png {parsed.png}: {error}") from error
