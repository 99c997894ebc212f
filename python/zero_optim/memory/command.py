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
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..drawing.figures import SizeUnit, row, size
from ..errors import ParameterError, UsageError
from ..rules.adamw import AdamW
from ..rules.codec import AVERAGES, MASTERS, STATE_DTYPES, codecs_for
from ..rules.lion import Lion
from ..rules.muon import Muon
from ..rules.options import Decays
from ..rules.sgd import SGD
from ..rules.update_rule import UpdateRule
from ..stores.offload import Offload, Tier, read_nbytes, read_offload
from ..train.config import DTYPES
from .activations import Batch
from .decoders import KNOWN, gpt_of
from .fit import MOST_MEMORY, MOST_PARAMETERS, largest_model, smallest_stage
from .plan import Job, Plan, plan
from .shapes import ModelShapes, of_decoder, of_module, usual_units
from .table import advice, memory_lines, ranks_of, said_smallest, unit_of

_NO_FOLDER = (FileNotFoundError, NotADirectoryError)

RULES = {
    "adamw": AdamW(),
    "amsgrad": AdamW(amsgrad=True),
    "lion": Lion(),
    "sgd": SGD(),
    "momentum": SGD(momentum=0.9),
}
MUON = "muon"
STAGES = (0, 1, 2, 3)
_OF_STAGE_3 = ("param_offload", "units", "prefetch")  # flags, by their names in Python


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``zero-optim plan``."""
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--params", type=_count, help="parameters, as in 7.5e9, of a GPT that is invented for them")
    known = f"{', '.join(KNOWN)}; module:factory, called on the meta device; or a config.json of transformers"
    model.add_argument("--model", help=f"one of {known}")

    def flag(name: str, kind: Any, text: str, **more: Any) -> None:
        parser.add_argument(name, type=kind, help=text, **more)

    flag("--world", int, "ranks (1)", default=1)
    flag(
        "--tp", int, "tensor-parallel ranks that a decoder is cut over: the others have the same slices (1)", default=1
    )
    flag("--pp", int, "stages of a pipeline that the layers are cut into: the fullest is planned (1)", default=1)
    flag("--replicate", int, "of these, how many hold each part: the others share, as in a mesh (1)", default=1)
    flag("--nodes", int, "machines that share the ranks evenly: says what each takes of host memory and disk")
    flag("--stage", _stages, "stages to compare, as in 1,2 (0,1,2,3)", metavar="STAGES")
    flag("--dtype", str, "of parameters and gradients (bf16; of module:factory as they are)", choices=tuple(DTYPES))
    flag("--grad-reduce-dtype", str, "in which gradients are reduced (--dtype)", choices=tuple(DTYPES))
    text = "in which shards of them add up (as they are reduced)"
    flag("--grad-accumulation-dtype", str, text, choices=("fp32",))
    text = "whose state is planned (adamw); momentum is SGD's, muon is for matrices of layers beside AdamW"
    flag("--optimizer", str, text, choices=(*RULES, MUON), default="adamw")
    flag("--master", str, "of bf16 parameters, as master= has it (fp32)", choices=tuple(MASTERS), default="fp32")
    flag("--state-dtype", str, "as state_dtype= has it (fp32)", choices=STATE_DTYPES, default="fp32")
    flag("--averages", int, "averages of the parameters, as ema_decay has them kept (0)", default=0)
    flag("--ema-dtype", str, "of the averages, as ema_dtype= has it (fp32)", choices=tuple(AVERAGES), default="fp32")
    parser.add_argument("--telemetry", action="store_true", help="count what telemetry=True measures")
    flag("--offload", _offload, "where the state is: none, paged, paged:BUDGET, cpu or nvme (none)", default=Offload())
    parser.add_argument("--param-offload", action="store_true", help="stage 3: shards of parameters in host memory")
    flag("--gpu-memory", _size, "of each rank's device (80GB)", default="80GB", metavar="SIZE")
    flag("--seq", int, "tokens of a sequence; with --batch activations are counted")
    flag("--batch", int, "sequences of a micro-batch on each rank")
    flag("--accumulate", int, "micro-batches in a step (1; with --pp as many as stages)")
    parser.add_argument("--checkpointing", action="store_true", help="layers are computed again in backward")
    parser.add_argument("--no-flash", action="store_true", help="attention keeps its matrices of [seq, seq]")
    flag("--units", str, "stage 3: the class of module that is gathered at a time (that of the longest ModuleList)")
    flag("--prefetch", int, "stage 3: units gathered ahead (1)")
    flag("--bucket-cap-mb", float, "as ShardedAdamW's (25, or 16,384 elements a rank)")
    flag("--rank", int, "plan this one, in place of the mean of all: they differ in padding")
    parser.add_argument("--json", action="store_true", help="print a list, an object a stage, in bytes")
    flag("--png", Path, "draw bars by kind, a stage each", metavar="FILE")


def run(parsed: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the plans. Raises UsageError."""
    _check_ranges(parsed)
    model, dtype = _model(parsed)
    _check_layers(parsed, model)
    stages = _stages_of(parsed, model)
    _check_stages(parsed, stages)
    plans = [_plan(model, _job(parsed, stage)) for stage in stages]
    if parsed.nodes is not None and not any(made.host or made.disk for made in plans):
        raise UsageError(
            "--nodes: says what a machine takes of host memory and disk: nothing, without --offload or --param-offload"
        )
    largest = [largest_model(made.job, dtype, parsed.gpu_memory) for made in plans]
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


def _count(text: str) -> int:
    try:
        count = int(float(text))
    except (ValueError, OverflowError):
        count = 0
    if count < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters such as 7.5e9, at least 1e6")
    if count > MOST_PARAMETERS:
        raise argparse.ArgumentTypeError(f"{text!r} is too many to be planned: at most {MOST_PARAMETERS:.0e}")
    return count


def _stages(text: str) -> tuple[int, ...]:
    stages = tuple(int(part) if part in ("0", "1", "2", "3") else -1 for part in text.split(","))
    if -1 in stages:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of stages such as 0,1,2,3")
    return tuple(sorted(set(stages)))


_LEAST_MEMORY = 10**6
"""Bytes on a device. A smaller size has no unit, by mistake."""


def _size(text: str) -> int:
    nbytes = read_nbytes(text)
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size such as 80GB or 40GiB")
    if nbytes < _LEAST_MEMORY:
        raise argparse.ArgumentTypeError(f"{text!r} is {nbytes:,} bytes: give a unit, as in 80GB or 40GiB")
    if nbytes > MOST_MEMORY:
        raise argparse.ArgumentTypeError(f"{text!r} is too much to be planned: at most {MOST_MEMORY // 10**12}TB")
    return nbytes


def _offload(text: str) -> Offload:
    kind, _, budget = text.partition(":")
    if kind == "none" and not budget:
        return Offload()
    if kind == Tier.NVME.value:  # a plan needs no folder
        return Offload(Tier.NVME)
    try:
        return read_offload(kind, int(budget) if budget.isdecimal() else budget or None)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of none, paged, paged:BUDGET (as in paged:8GB), cpu and nvme"
        ) from error


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
    if name in KNOWN:
        return of_decoder(KNOWN[name], dtype), dtype
    if name.endswith(".json") or Path(name).is_dir():
        return _shapes(parsed, _from_config(Path(name)).to(dtype)), dtype
    if ":" in name:
        model = _from_factory(name)
        shapes = _shapes(parsed, model.to(dtype) if parsed.dtype else model)
        return shapes, max((p.dtype for p in shapes.parameters), key=lambda of: of.itemsize, default=dtype)
    near = difflib.get_close_matches(name, KNOWN, 1)
    meant = f"; did you mean {near[0]}?" if near else f": it knows {', '.join(KNOWN)}"
    raise UsageError(f"--model {name}: no name that it knows, no module:factory and no config.json{meant}")


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
    shape = f", {width.layers} layers of width {width.hidden:,}" if width else ""
    which = "the mean of all ranks" if parsed.rank is None else f"rank {parsed.rank}"
    yield f"{model.name}: {model.numel:,} parameters{shape}; {ranks_of(plans[0].job)}; {unit.name} a rank, {which}"
    yield ""
    yield row("", [f"stage {made.job.stage}" for made in plans])
    if parsed.pp > 1:
        yield row("stage of the pipeline", [f"{made.pipeline_stage + 1} of {parsed.pp}" for made in plans])
    yield from memory_lines(plans, unit)
    yield row("asleep", [unit.cell(made.asleep) for made in plans])
    yield row("  with the parameters", [unit.cell(made.asleep_with_parameters) for made in plans])
    yield row("sent in a step", [unit.cell(made.communicated) for made in plans])
    yield from _by_link(parsed, plans, unit)
    yield row("buckets", [f"{made.buckets:,}" for made in plans])
    yield row(f"largest GPT in {size(room)}", [_billions(most) for most in largest])
    yield ""
    if parsed.batch is None:
        yield "Activations are not in it: --seq and --batch count them."
        if parsed.tp > 1 or parsed.pp > 1:
            yield "So neither is what is sent of them, along slices and along the pipeline."
    else:
        yield from _about_activations(plans[0])
    yield (
        "CUDA's context and NCCL's communicators are not in it: beside_torch() of zero_optim.memory.track() measures "
        "them on the GPU."
    )
    if any(made.first_step for made in plans):
        yield "In the first step of stages 0 to 2 no gradient is reduced before backward ends."
    if parsed.nodes is not None:
        yield from _of_nodes(parsed, plans)
    chosen = plans[0].job
    smallest = smallest_stage(model, chosen, room)
    yield said_smallest(smallest, room)
    best = smallest or plans[-1]
    yield advice(best, room)


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
