"""A model as a plan has to know it: the size and dtype of every parameter, and which of them are a unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import torch
from torch import Tensor, nn

from ..params.tensor_slice import is_cut, local_of, room_of
from ..rules.muon import split_for_muon
from ..rules.update_rule import UpdateRule
from ..shard_module import plan_units
from .decoders import Decoder, Width

_NAMES = {  # of the fields of ``Width``, in configurations
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "hidden"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "heads"),
    "vocabulary": ("vocab_size",),
}


_VECTOR = 8
"""A matrix has more than so many times the hidden size. The longest bias, as long as the MLP is wide, has less."""


@dataclass(frozen=True)
class ParameterShape:
    """The part of a parameter that a rank has.

    Attributes:
        trained: whether it has gradients and state.
        cut: whether the tensor-parallel ranks have a slice each.
        most: elements of the largest slice, by which buckets are laid out on all of them; None: as many as here.
        sharers: of an expert, how many ranks share its state, and which of them this is; None: no expert.
        rule: the rule that updates it; None: the job's.
        matrix: whether it is a matrix of a hidden layer, which Muon is for.
        shape: by which a rule tells the cost of its update; None: not known.
        joined: tensor-parallel ranks whose slices are made whole, for a rule that needs whole parameters; 1: none.
    """

    numel: int
    dtype: torch.dtype
    trained: bool = True
    cut: bool = False
    most: int | None = None
    sharers: tuple[int, int] | None = None
    rule: UpdateRule | None = None
    matrix: bool = False
    shape: tuple[int, ...] | None = None
    joined: int = 1

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
    width: Width | None = field(default=None)
    tied: tuple[int, ...] = ()

    @property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel for parameter in self.parameters)


def of_decoder(decoder: Decoder, dtype: torch.dtype) -> ModelShapes:
    """Make the shapes of a decoder. Its blocks are the units."""
    first, block = len(decoder.before), len(decoder.block)
    starts = range(first, first + decoder.layers * block, block)
    last = first + decoder.layers * block
    units = ((*range(first), *range(last, last + len(decoder.after))), *(tuple(range(s, s + block)) for s in starts))
    hidden = range(first, last)
    matrices = {number for number in hidden if decoder.numels[number] > _VECTOR * decoder.width.hidden}
    parameters = tuple(ParameterShape(n, dtype, matrix=i in matrices) for i, n in enumerate(decoder.numels))
    return ModelShapes(decoder.name, parameters, units, width=decoder.width, tied=(0,) if decoder.tied else ())


def with_lora(model: ModelShapes, rank: int) -> ModelShapes:
    """Freeze a model, and give each matrix of its layers adapters of ``[rank, columns]`` and ``[rows, rank]``.

    A matrix whose shape is not known, as of a decoder, has the hidden size on one side. Raises ValueError for a model
    without a matrix.
    """

    def parts(parameter: ParameterShape) -> Iterator[ParameterShape]:
        yield replace(parameter, trained=False)
        if parameter.matrix:
            if parameter.shape is not None:
                *copies, rows, columns = parameter.shape
            else:
                assert model.width is not None  # as every decoder's
                copies, rows, columns = [], parameter.numel // model.width.hidden, model.width.hidden
            for shape in ((*copies, rank, columns), (*copies, rows, rank)):
                yield replace(parameter, numel=math.prod(shape), shape=shape, most=None)

    if not any(parameter.matrix for parameter in model.parameters):
        raise ValueError("the model has no matrices of layers that are known as such")
    return _divided(model, parts)


def with_trained_part(model: ModelShapes, part: Fraction) -> ModelShapes:
    """Freeze a model, but for this ``part`` of each parameter. A parameter that is frozen already stays so."""

    def parts(parameter: ParameterShape) -> Iterator[ParameterShape]:
        trained = round(parameter.numel * part) if parameter.trained else 0
        for numel, of in ((parameter.numel - trained, False), (trained, True)):
            if numel:
                yield replace(parameter, numel=numel, trained=of, shape=None, most=None)

    return _divided(model, parts)


def _divided(model: ModelShapes, parts: Callable[[ParameterShape], Iterable[ParameterShape]]) -> ModelShapes:
    """Put its ``parts`` in the place of each parameter."""
    parameters: list[ParameterShape] = []
    places = []
    for parameter in model.parameters:
        first = len(parameters)
        parameters += parts(parameter)
        places.append(range(first, len(parameters)))

    def put(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(place for index in indices for place in places[index])

    return replace(
        model,
        parameters=tuple(parameters),
        units=tuple(put(unit) for unit in model.units),
        order=None if model.order is None else put(model.order),
        tied=put(model.tied),
    )


def cut_over(model: ModelShapes, ranks: int) -> ModelShapes:
    """Cut a decoder over tensor-parallel ranks. Returns what the first has, whose slices are the largest.

    Matrices, and the biases of those that are cut by columns, are cut. Parameters with no more elements than the hidden
    size, such as norms and the other biases, are on every rank.

    Raises ValueError for a model whose hidden size is not known.
    """
    if ranks == 1:
        return model
    if model.width is None:
        raise ValueError(
            "what tensor parallelism cuts is told by the hidden size, and the model has no config with it: give it one "
            "with the names of transformers, such as model.config = types.SimpleNamespace(hidden_size=512)"
        )
    hidden = model.width.hidden
    parameters = [
        p if p.numel <= hidden else replace(p, numel=-(-p.numel // ranks), cut=True, joined=ranks)
        for p in model.parameters
    ]
    return replace(model, parameters=tuple(parameters))


def of_stage(model: ModelShapes, stages: int, stage: int) -> ModelShapes:
    """Choose the part of the model that ``stage``, from 0, of a pipeline has.

    The units are the layers. They go to the stages in order, as evenly as they can: the first stages have one more
    where they do not come out even. The first stage has also what comes before the layers, as embeddings, and the last
    what comes behind, as the last norm and the head. Tied parameters are on both.

    Raises ValueError where there are fewer layers than stages.
    """
    if stages == 1:
        return model
    root, *layers = model.units or ((),)
    if len(layers) < stages:
        known = f"the model has {len(layers)}" if layers else "those of the model are not known: name their class"
        raise ValueError(f"each of {stages} stages of a pipeline needs a layer, and {known}")
    least, more = divmod(len(layers), stages)
    first = stage * least + min(stage, more)
    own = layers[first : first + least + (stage < more)]
    start = min(index for layer in layers for index in layer)
    of_root = [index for index in root if index < start] if stage == 0 else []
    if stage == stages - 1:
        of_root = [*model.tied, *(index for index in root if index >= start)]
    kept = sorted({*of_root, *(index for layer in own for index in layer)})
    place = {index: number for number, index in enumerate(kept)}
    return replace(
        model,
        parameters=tuple(model.parameters[index] for index in kept),
        units=tuple(tuple(place[index] for index in unit) for unit in (of_root, *own)),
        order=None if model.order is None else tuple(place[index] for index in model.order if index in place),
        width=model.width and replace(model.width, layers=len(own)),
        tied=(),
    )


def of_module(model: nn.Module, units: Sequence[type[nn.Module] | str] = (), name: str = "") -> ModelShapes:
    """Read the shapes of a model, which may be on the ``meta`` device.

    Args:
        units: as ``shard_module`` takes them; empty: no stage 3.

    Raises ParameterError where the model has no such module.
    """
    index_of = {id(parameter): index for index, parameter in enumerate(model.parameters())}
    plans = plan_units(model, units) if units else []
    of_units = tuple(tuple(index_of[key] for key in plan.parameters) for plan in plans)
    buffers = {id(buffer): buffer.nbytes for buffer in model.buffers()}
    matrices = {id(parameter) for _, parameter in split_for_muon(model)[0]}
    return ModelShapes(
        name or type(model).__name__,
        tuple(replace(shape_of(p, trained=p.requires_grad), matrix=id(p) in matrices) for p in model.parameters()),
        of_units,
        sum(buffers.values()),
        width=_width(getattr(model, "config", None)),
        tied=_tied([index_of[id(p)] for _, p in model.named_parameters(remove_duplicate=False)], of_units),
    )


def _tied(uses: Sequence[int], units: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Find the root's parameters that are used on both sides of the layers. ``uses``: indices, in order of modules."""
    root, *layers = units or ((),)
    inside = {index for layer in layers for index in layer}
    places = [place for place, index in enumerate(uses) if index in inside]
    behind = set(uses[places[-1] :]) if places else set()
    return tuple(index for index in root if index in behind and index in uses[: places[0]])


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
