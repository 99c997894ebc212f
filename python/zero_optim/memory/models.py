"""What a plan needs of a model: the size and dtype of every parameter, and which of them are a unit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ..params.tensor_slice import is_cut, local_of, room_of
from ..rules.muon import split_for_muon
from ..rules.update_rule import UpdateRule
from ..shard_module import Kind, UnitPlan, plan_units

# -- decoders ----------------------------------------------------------------------------------------------------------

GPT_VOCABULARY = 50257
ASPECT = 128  # width over depth of an invented decoder: GPT-3 has 96 layers of width 12288


@dataclass(frozen=True)
class Width:
    """The sizes that activations are computed from. ``vocabulary``: rows of the head."""

    layers: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True)
class Decoder:
    """Equal blocks, and the rest.

    Attributes:
        block: elements of each parameter of a block, in the order of its modules.
        before, after: of what is outside of the blocks: embeddings; the last norm, and the head unless it is tied.
        experts: of each block; of several the last two of its parameters have all.
    """

    name: str
    width: Width
    block: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    experts: int = 1

    @property
    def numels(self) -> tuple[int, ...]:
        """Sizes of all parameters, in the order in which they are used."""
        return self.before + self.block * self.width.layers + self.after

    @property
    def numel(self) -> int:
        """Elements of the whole model."""
        return sum(self.numels)


def llama(name: str, layers: int, hidden: int, ffn: int, kv: int, vocabulary: int, experts: int = 1) -> Decoder:
    """Grouped-query attention, a gated MLP, no biases, a head of its own. ``kv``: the width of keys, and of values."""
    mlp = (ffn, ffn, ffn) if experts == 1 else (experts, 2 * ffn * experts, ffn * experts)  # with a router
    block = (hidden, hidden, *(hidden * wide for wide in (hidden, kv, kv, hidden, *mlp)))
    embedding = vocabulary * hidden
    return Decoder(name, Width(layers, hidden, vocabulary), block, (embedding,), (hidden, embedding), experts)


def _gpt(name: str, layers: int, hidden: int, *before: int) -> Decoder:
    """GPT-2's blocks, with biases; the head is the embedding. ``before``: elements of what precedes the blocks."""
    norm, square = (hidden, hidden), hidden * hidden
    attention = (3 * square, 3 * hidden, square, hidden)
    mlp = (4 * square, 4 * hidden, 4 * square, hidden)
    block = (*norm, *attention, *norm, *mlp)
    return Decoder(name, Width(layers, hidden, GPT_VOCABULARY), block, before, norm)


def gpt(name: str, layers: int, hidden: int, positions: int) -> Decoder:
    """A GPT with an embedding and learned positions."""
    return _gpt(name, layers, hidden, GPT_VOCABULARY * hidden, positions * hidden)


def gpt_of(parameters: int) -> Decoder:
    """A GPT of exactly so many parameters. Raises ValueError for fewer than a million.

    It has L = (parameters / (12 * 128^2))^(1/3) layers, rounded: about 128 times as wide as it is deep. Its width is
    the largest multiple of 8 that leaves room for an embedding of 50 257 rows; that takes what is left over as well.
    """
    if parameters < 10**6:
        raise ValueError(f"{parameters:,} parameters are too few for a GPT: at least 1,000,000")
    layers = max(1, round((parameters / (12 * ASPECT**2)) ** (1 / 3)))
    widths = range(8, 1 << 22, 8)
    fitting = bisect_right(widths, parameters, key=lambda wide: _gpt("", layers, wide, GPT_VOCABULARY * wide).numel)
    hidden = widths[fitting - 1]
    return _gpt("a GPT", layers, hidden, parameters - _gpt("", layers, hidden).numel)


_DECODERS = (
    gpt("gpt2", 12, 768, 1024),
    gpt("gpt2-medium", 24, 1024, 1024),
    gpt("gpt2-large", 36, 1280, 1024),
    gpt("gpt2-xl", 48, 1600, 1024),
    gpt("gpt3-175b", 96, 12288, 2048),
    llama("llama-2-7b", 32, 4096, 11008, 4096, 32000),
    llama("llama-2-13b", 40, 5120, 13824, 5120, 32000),
    llama("llama-2-70b", 80, 8192, 28672, 1024, 32000),
    llama("llama-3-8b", 32, 4096, 14336, 1024, 128256),
    llama("llama-3-70b", 80, 8192, 28672, 1024, 128256),
    llama("llama-3-405b", 126, 16384, 53248, 1024, 128256),
    llama("mistral-7b", 32, 4096, 14336, 1024, 32000),
    llama("mixtral-8x7b", 32, 4096, 14336, 1024, 32000, experts=8),
)
KNOWN = {decoder.name: decoder for decoder in _DECODERS}
"""By name, from their published configurations."""

# -- shapes ------------------------------------------------------------------------------------------------------------

_NAMES = {  # of the fields of ``Width``, in configurations
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden"),
    "vocabulary": ("vocab_size",),
}

_VECTOR = 8  # a matrix has more than so many times the hidden size; the longest bias, that of the MLP, has less


@dataclass(frozen=True)
class ParameterShape:
    """The part of a parameter that a rank has.

    Attributes:
        trained: whether it has gradients and state.
        cut: whether the tensor-parallel ranks have a slice each.
        most: elements of the largest slice, by which buckets are laid out on all of them; None: as many as here.
        shard_group: of an expert, how many ranks its state is sharded over, and which of them this is; None: no expert.
        experts: of a whole model, the number of the first expert that is in it, and how many are; None: no expert.
        rule: the rule that updates it; None: the job's.
        matrix: whether it is a matrix of a hidden layer, which Muon is for.
        shape: by which a rule computes the cost of its update; None: not known.
    """

    numel: int
    dtype: torch.dtype
    trained: bool = True
    cut: bool = False
    most: int | None = None
    shard_group: tuple[int, int] | None = None
    experts: tuple[int, int] | None = None
    rule: UpdateRule | None = None
    matrix: bool = False
    shape: tuple[int, ...] | None = None

    @property
    def room(self) -> int:
        """Elements that the parameter gets in a bucket."""
        return self.numel if self.most is None else self.most


def shape_of(parameter: Tensor, *, trained: bool) -> ParameterShape:
    """Read off a parameter what this rank has of it."""
    numel, dtype = local_of(parameter).numel(), parameter.dtype
    return ParameterShape(numel, dtype, trained, is_cut(parameter), room_of(parameter), shape=tuple(parameter.shape))


@dataclass(frozen=True)
class ModelShapes:
    """A model without its tensors.

    Attributes:
        parameters: in the order of ``model.parameters()``; tied ones once.
        units: indices of the parameters of each unit, the root's first; empty: none are known, and no stage 3.
        buffers: bytes of the modules' buffers.
        order: parameters as their gradients become ready; None: from the last to the first.
        width: sizes of a decoder, from which activations are computed; None: not known.
        tied: of the root's parameters, those that are used behind the other units too, as an embedding that is a head.
    """

    name: str
    parameters: tuple[ParameterShape, ...]
    units: tuple[tuple[int, ...], ...] = ()
    buffers: int = 0
    order: tuple[int, ...] | None = None
    width: Width | None = None
    tied: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)


def of_decoder(decoder: Decoder, dtype: torch.dtype) -> ModelShapes:
    """Make the shapes of a decoder. Its blocks are the units."""
    numels, width, block = decoder.numels, decoder.width, len(decoder.block)
    first, last = len(decoder.before), len(numels) - len(decoder.after)
    blocks = [tuple(range(start, start + block)) for start in range(first, last, block)]
    units = ((*range(first), *range(last, len(numels))), *blocks)
    matrices = {number for number in range(first, last) if numels[number] > _VECTOR * width.hidden}
    held = {i: (0, decoder.experts) for of in blocks if decoder.experts > 1 for i in of[-2:]}
    parameters = tuple(
        ParameterShape(n, dtype, matrix=i in matrices, experts=held.get(i)) for i, n in enumerate(numels)
    )
    tied = max(decoder.after) < width.vocabulary * width.hidden  # no head
    return ModelShapes(decoder.name, parameters, units, width=width, tied=(0,) if tied else ())


def of_module(
    model: nn.Module, units: Sequence[Kind] = (), name: str = "", experts: Iterable[Kind] = ()
) -> ModelShapes:
    """Read the shapes of a model, which may be on the ``meta`` device.

    Args:
        units: as ``shard_module`` takes them; empty: no stage 3.
        experts: the same, a dict or its keys; empty: modules that are named so. The model has the experts of all ranks.

    Raises ParameterError where the model has no such module.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(model.parameters())}  # tied ones once
    plans = plan_units(model, units) if units else []
    of_units = tuple(tuple(index_of[key] for key in plan.parameters) for plan in plans)
    kinds = [*experts] or [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]
    with_experts = [plan for plan in plan_units(model, (), kinds) if plan.experts] if kinds else []
    experts_of = {key: _experts_in(plan, key) for plan in with_experts for key in plan.parameters}
    matrices = {id(parameter) for _, parameter in split_for_muon(model)[0]}
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    root = of_units[0] if of_units else ()
    return ModelShapes(
        name or type(model).__name__,
        tuple(
            replace(shape_of(p, trained=p.requires_grad), matrix=id(p) in matrices, experts=experts_of.get(id(p)))
            for p in model.parameters()
        ),
        of_units,
        sum({id(buffer): buffer.nbytes for buffer in model.buffers()}.values()),
        width=_width(getattr(model, "config", None)),
        tied=tuple(index for key, index in index_of.items() if uses[key] > 1 and index in root),
    )


def _experts_in(plan: UnitPlan, key: int) -> tuple[int, int]:
    """Find which experts a parameter has: that of the first number in its name, or as many as it has rows."""
    outside = plan.name.rpartition(".")[0]
    numbers = [part for part in plan.registrations[key][0][2].removeprefix(outside).split(".") if part.isdecimal()]
    return (int(numbers[0]), 1) if numbers else (0, (*plan.parameters[key].shape, 1)[0])


def usual_units(model: nn.Module) -> list[str]:
    """Guess units: the classes in the longest ``ModuleList``, as a transformer's blocks; none without such a list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    longest = max(lists, key=len, default=None)
    return [] if longest is None else sorted({type(module).__name__ for module in longest})


def _width(config: object) -> Width | None:
    found = {}
    for what, names in _NAMES.items():
        values = (getattr(config, name, None) for name in names)
        found[what] = next((value for value in values if isinstance(value, int)), None)
    return None if None in found.values() else Width(**found)  # type: ignore[arg-type]  # none is None


# -- a part of a model -------------------------------------------------------------------------------------------------


def with_lora(model: ModelShapes, rank: int) -> ModelShapes:
    """Freeze a model, and give each matrix of its layers adapters of ``[rank, columns]`` and ``[rows, rank]``.

    A matrix whose shape is not known, as of a decoder, has the hidden size on one side. Raises ValueError for a model
    without a matrix.
    """
    if not any(parameter.matrix for parameter in model.parameters):
        raise ValueError("the model has no matrices of layers that are known as such")
    hidden = model.width.hidden if model.width is not None else 1  # a decoder's, which has no shapes
    parameters: list[ParameterShape] = []
    places = []  # of each parameter and its adapters
    for parameter in model.parameters:
        first = len(parameters)
        parameters.append(replace(parameter, trained=False))
        if parameter.matrix:
            *copies, rows, columns = parameter.shape or (parameter.numel // hidden, hidden)
            for shape in ((*copies, rank, columns), (*copies, rows, rank)):
                parameters.append(replace(parameter, numel=math.prod(shape), shape=shape, most=None))
        places.append(range(first, len(parameters)))

    def put(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(place for index in indices for place in places[index])

    units, order = tuple(map(put, model.units)), None if model.order is None else put(model.order)
    return replace(model, parameters=tuple(parameters), units=units, order=order, tied=put(model.tied))


def cut_over(model: ModelShapes, ranks: int) -> ModelShapes:
    """Cut a decoder over tensor-parallel ranks. Returns what the first has, whose slices are the largest.

    Matrices, and the biases of those that are cut by columns, are cut. Parameters with no more elements than the hidden
    size, such as norms and the other biases, are on every rank. Raises ValueError where the hidden size is not known.
    """
    if ranks == 1:
        return model
    if model.width is None:
        raise ValueError("tensor parallelism cuts by the hidden size, and the model has no config with it")
    hidden = model.width.hidden
    parts = (p if p.numel <= hidden else replace(p, numel=-(-p.numel // ranks), cut=True) for p in model.parameters)
    return replace(model, parameters=tuple(parts))


def spread(model: ModelShapes, parts: int, ranks: int, rank: int) -> ModelShapes:
    """Choose the first of ``parts`` of the experts. ``ranks // parts`` have it, of which ``rank // parts`` is planned.

    Experts of a unit are a unit of their own. Raises ValueError where they do not come out even.
    """
    if parts == 1:
        return model
    experts = max((sum(parameter.experts) for parameter in model.parameters if parameter.experts), default=0)
    if not experts:
        raise ValueError(f"expert_parallel {parts}: the model has no experts")
    if experts % parts:
        raise ValueError(f"expert_parallel must divide the model's {experts} experts, got {parts}")
    each = experts // parts

    def own(parameter: ParameterShape, count: int) -> ParameterShape:
        shape = parameter.shape
        numel, rows = (n * min(count, each) // count for n in (parameter.numel, shape[0] if shape else 0))
        shape = shape and (rows, *shape[1:])
        return replace(parameter, numel=numel, most=None, shape=shape, shard_group=(ranks // parts, rank // parts))

    parameters = tuple(own(p, p.experts[1]) if p.experts else p for p in model.parameters)
    kept = [i for i, parameter in enumerate(parameters) if parameter.experts is None or parameter.experts[0] < each]
    halves = [[i for i in unit if bool(parameters[i].experts) is of] for unit in model.units for of in (False, True)]
    return _part(replace(model, parameters=parameters), kept, halves)


def _part(model: ModelShapes, kept: Sequence[int], units: Iterable[Iterable[int]]) -> ModelShapes:
    """The part of a model that has these parameters, in these units."""
    place = {index: number for number, index in enumerate(kept)}
    of_units = [tuple(place[index] for index in unit if index in place) for unit in units]
    return replace(
        model,
        parameters=tuple(model.parameters[index] for index in kept),
        units=(*of_units[:1], *filter(None, of_units[1:])),
        order=None if model.order is None else tuple(place[index] for index in model.order if index in place),
        tied=(),
    )


def of_stage(model: ModelShapes, stages: int, stage: int) -> ModelShapes:
    """Choose the part of the model that ``stage``, from 0, of a pipeline has.

    The units are the layers. They go to the stages in order, as evenly as they can: the first stages have one more
    where they do not come out even. The first stage has also what comes before the layers, as embeddings, and the last
    what comes behind, as the last norm and the head. Tied parameters are on both. Raises ValueError for too few layers.
    """
    if stages == 1:
        return model
    root, *layers = model.units or ((),)
    if len(layers) < stages:
        raise ValueError(f"pipeline needs a layer for each of {stages} stages, but the model has {len(layers)}")
    least, more = divmod(len(layers), stages)
    first = stage * least + min(stage, more)
    own = layers[first : first + least + (stage < more)]
    start = min(index for layer in layers for index in layer)
    of_root = [index for index in root if index < start] if stage == 0 else []
    if stage == stages - 1:
        of_root = [*model.tied, *(index for index in root if index >= start)]
    kept = sorted({*of_root, *(index for layer in own for index in layer)})
    width = model.width and replace(model.width, layers=len(own))
    return replace(_part(model, kept, (of_root, *own)), width=width)
