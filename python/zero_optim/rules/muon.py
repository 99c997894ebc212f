"""Muon: momentum that is orthogonalized before it is subtracted (Jordan et al., "Muon: An optimizer for hidden
layers in neural networks", 2024), as ``torch.optim.Muon`` has it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

import zero_kernels
from zero_kernels import ROW

from ..comm.collectives import Comm
from ..comm.sharding import split_runs
from ..params.layout import WholeParameters, round_up
from ..params.param_shard import plain_parameter
from ..params.tensor_slice import DIM, SIZES, STRIDE, Joint, is_plain_slice, whole_shape
from . import newton_schulz
from .codec import Begins, StateTensor
from .homes import TENSOR_ALL_TO_ALL, MatrixHomes, WorkSplit, joined_parts, joined_slices
from .kernel_rule import KernelRule
from .options import Fixed, Flag, Number, Option, check_choice
from .update_rule import MASTER, ShardUpdate, ToJoin, UpdateRule, Whole, parts_of

BUFFER = "momentum_buffer"
"""The name of the momentum, an exponential average of gradients."""

_LOOK_AHEAD = zero_kernels.RULES["muon_look_ahead"]
"""The first kernel. The second reads the same table."""

# The least rows and columns of matrices that are batched with those of other parameters, on a CPU. Products of bf16
# matrices of this size were seen to have the same bits whatever the number of matrices. For smaller ones torch chooses
# the algorithm by the elements of all of them together. Not tested on a GPU.
LEAST_TOGETHER = 17

# The most elements that are updated together, unless one parameter has more. On a processor they stay in its cache. On
# a GPU they are more, since each launch takes time (not measured).
ON_A_PROCESSOR, ON_A_GPU = 2**18, 2**22

_numel = attrgetter("numel")


class _Part(NamedTuple):
    """A shard's part of a parameter: ``numel`` elements, from ``start`` on in the shard, and from ``in_param`` on in
    the parameter as it lies in memory."""

    whole: Whole
    start: int
    in_param: int
    numel: int


class _Places(NamedTuple):
    """The ranks on which matrices are orthogonalized.

    Attributes:
        over_shards: homes of parameters that are sharded over ranks; None: none is.
        of_wholes: the parameters, whole by then, that this rank orthogonalizes among its replicas.
        over_slices: homes of parameters of which tensor-parallel ranks have slices; None: there are none.
        of_slices: the same among those that have their home here.
    """

    over_shards: MatrixHomes | None
    of_wholes: WorkSplit
    over_slices: MatrixHomes | None
    of_slices: WorkSplit


VIEW = "view"
"""The option's name."""

ROWS, COLUMNS = "rows", "columns"
_DIMS = {ROWS: 1, COLUMNS: 2}
"""The dimension of [matrices, rows, columns] that a view cuts, by its key."""


SCALES = (None, "original", "match_rms_adamw", "spectral_unclamped")
"""Values of ``adjust_lr_fn``; see ``scale_of``."""

SHARE, REPEAT = REPLICAS = ("share", "repeat")
"""Values of ``ns_replicas``."""

_HEADS = ("head", "lm_head", "output", "classifier", "score")
"""Names of modules that ``split_for_muon`` takes for heads."""


class _Scale(Fixed):
    """``adjust_lr_fn``, of which None means "original"."""

    def same(self, value: Any, other: Any) -> bool:
        return (value or "original") == (other or "original")


@dataclass(frozen=True)
class MatrixView(Option):
    """``view`` of a parameter group: None, or ``{"rows": blocks}`` or ``{"columns": blocks}``, where ``blocks`` is the
    number of equal ones, or the length of each.

    The matrices of a parameter are, by its shape, first::

        2 dimensions    [rows, columns]                one matrix
        3               [experts, rows, columns]       one for each expert
        4 and 5         [out, in, height, width]       a convolution: one of [out, in * height * width]

    By ``view`` of a parameter group each of them is several, side by side::

        {"params": q, "view": {"rows": 12}}                  12 equal blocks of rows, such as heads
        {"params": qkv, "view": {"rows": (768, 256, 256)}}   blocks of so many rows
        {"params": out, "view": {"columns": 12}}             12 equal blocks of columns
    """

    stays: bool = field(default=True, kw_only=True)
    optional = True
    coefficients = ()

    def check(self, value: Any, owner: str) -> None:
        if value is None:
            return
        cut, blocks = next(iter(value.items())) if isinstance(value, Mapping) and len(value) == 1 else (None, ())
        lengths = blocks if isinstance(blocks, tuple | list) else [blocks]
        if cut not in _DIMS or not lengths or not all(type(length) is int and length > 0 for length in lengths):
            raise ValueError(
                f"{self.name} of {owner} must be None, {{'rows': blocks}} or {{'columns': blocks}}, and blocks the "
                f"number of equal ones, or the length of each; got {value!r}"
            )


class Muon(UpdateRule):
    """One momentum, 4 bytes a parameter less than AdamW; for matrices alone.

    ``view`` of a parameter group says which matrices its parameters are; see ``MatrixView``. Other options of its own,
    the same for all groups: ``ns_coefficients``, ``ns_steps``, ``eps``, ``ns_gram``, ``ns_product`` and ``ns_replicas``
    of the Newton-Schulz iteration, and ``adjust_lr_fn``, by which the rate depends on a matrix's shape; see
    ``scale_of``.
    """

    options = (
        Number("lr", 1e-3, rate=True),
        Number("weight_decay", 0.1),
        Number("momentum", 0.95),
        Flag("nesterov", True),
        Fixed("ns_coefficients", newton_schulz.QUINTIC),
        Fixed("eps", 1e-7),
        Fixed("ns_steps", 5),
        Fixed("ns_gram", True),
        # State from another way to compute the iteration loads: it differs by rounding alone, if at all.
        Fixed("ns_product", newton_schulz.TORCH, stays=True),
        Fixed("ns_replicas", SHARE, stays=True),
        _Scale("adjust_lr_fn", None),
        MatrixView(VIEW, None),
    )
    tensors = (StateTensor(MASTER, Begins.PARAMETER), StateTensor(BUFFER))
    counterparts = frozenset(("Muon",))
    needs_steps = False
    layout = WholeParameters()
    joins_parts, joined_in = True, torch.bfloat16
    # Found in the first update of a prepared rule.
    _places: _Places | None = None
    # The kernels that go over a shard, before its matrices are orthogonalized and after. Made in ``prepared``.
    _passes: tuple[KernelRule, KernelRule]

    def check(self) -> None:
        super().check()
        newton_schulz.check(*(self.defaults[name] for name in newton_schulz.OPTIONS))
        check_choice("adjust_lr_fn", self.defaults["adjust_lr_fn"], SCALES)
        check_choice("ns_replicas", self.defaults["ns_replicas"], REPLICAS)

    def refuse_saved(self, number: int, group: Mapping[str, Any]) -> str | None:
        foreign = next((name for name in ("betas", "dampening") if name in group), None)
        if foreign is None:
            return None
        return (
            f"parameter group {number} of the state has {foreign}: it is of another optimizer, whose momentum means "
            "something else than Muon's. Convert it by zero_optim.state_for_muon, or let the momentum begin anew"
        )

    def refuse_device(self, device: torch.device) -> str | None:
        if self.defaults["ns_product"] != newton_schulz.TRITON:
            return None
        reason = zero_kernels.why_no_symmetric_product(device)
        return reason and f"ns_product='triton' needs Triton on a GPU, and {reason}: leave ns_product out"

    @property
    def splits_work(self) -> bool:
        return bool(self.defaults["ns_replicas"] == SHARE)

    def needs_whole(self, joint: Joint) -> bool:
        """False for a stack that is sliced between its matrices: each slice has whole ones."""
        return len(joint.shape) != 3 or joint.dim != 0

    def refuse_parameter(self, parameter: Tensor, group: Mapping[str, Any]) -> str | None:
        """A view is of the whole matrix, also where this rank has a slice of it."""
        parameter, view = plain_parameter(parameter), group.get(VIEW)
        whole = whole_shape(parameter, self.plain_slices)
        if (reason := refuse_view(whole, view)) is not None and whole != tuple(parameter.shape):
            return f"{reason}. It is a slice of shape {tuple(parameter.shape)}, and a view is of the whole"
        if reason is not None or view is None:
            return reason
        known = hasattr(parameter, STRIDE) or hasattr(parameter, SIZES)  # the number of blocks
        if self.plain_slices == 1 or not is_plain_slice(parameter) or known:
            return None
        sliced, of_rows = getattr(parameter, DIM), 1 if parameter.dim() == 3 else 0
        splits = sliced == of_rows if ROWS in view else sliced > of_rows
        if not splits:
            return None
        return (
            f"is a slice along dimension {sliced}, which view={dict(view)!r} of its group splits: "
            f"set {STRIDE} = 1 on the parameter where slices follow each other in the whole, and to the number of "
            "blocks where each rank has a slice of every one, as of queries, keys and values"
        )

    @property
    def columns(self) -> tuple[str, ...]:
        return _LOOK_AHEAD.columns

    def fill_table(self, by_group: Tensor, group_of: Tensor, steps: Tensor, active: Tensor, table: Tensor) -> None:
        _LOOK_AHEAD.fill_table(by_group, group_of, steps, active, table)

    def prepared(self) -> Muon:
        made = super().prepared()
        look_ahead, subtract = (KernelRule(name) for name in (_LOOK_AHEAD.name, "muon_subtract"))
        look_ahead.codecs = {name: codec for name, codec in self.codecs.items() if name == BUFFER}
        subtract.codecs = {name: codec for name, codec in self.codecs.items() if name != BUFFER}
        made._passes = (look_ahead.prepared(), subtract.prepared())
        return made

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        """In three passes: the momentum, what is subtracted from each matrix, the subtraction. Some matrices at a
        time."""
        stored = [part for tensor in self.tensors for part in parts_of(self.codecs, tensor)]
        for shard in shards:
            for wholes in split_runs(shard.wholes, _numel, _most(shard.grad)):
                # They follow each other in the shard: view that part of it.
                start = wholes[0].start
                numel = round_up(wholes[-1].start + wholes[-1].numel, ROW) - start
                rows = slice(start // ROW, (start + numel) // ROW)
                run = shard._replace(
                    grad=shard.grad.narrow(0, start, numel),
                    parameter=shard.parameter.narrow(0, start, numel),
                    state={
                        part.name: shard.state[part.name].narrow(0, *part.span(start, numel))
                        for part in stored
                        if part.name in shard.state
                    },
                    row_slot=shard.row_slot[rows],
                    row_keys=None if shard.row_keys is None else shard.row_keys[rows],
                    wholes=[whole._replace(start=whole.start - start) for whole in wholes],
                )
                ahead = self._look_ahead(run)
                self._orthogonalize(ahead, run.wholes)
                self._subtract(run, [_Part(whole, whole.start, 0, whole.numel) for whole in run.wholes], ahead)

    def before_joining(self, shard: ShardUpdate) -> Tensor:
        """Update the momentum. Returns the input of the iteration, [shard_numel] bf16."""
        return self._look_ahead(shard).to(self.joined_in)

    def join(self, held: Sequence[Tensor], shards: Sequence[ToJoin]) -> None:
        """Collective. Send shards of matrices to their homes in the shard group, then slices to theirs among the
        tensor-parallel ranks. Replicas split the matrices that they all have then, and orthogonalize them. The results
        go back the same way."""
        # Each of the exchanges below happens on all ranks of its group or on none: the layout decides, which is common.
        if self._places is None:
            self._places = self._places_of(shards)
        over_shards, of_wholes, over_slices, of_slices = self._places
        whole = held if over_shards is None else [over_shards.bring(held)]
        self._orthogonalize_replicated(whole, of_wholes)
        if over_slices is not None:
            here = over_slices.bring(whole)
            self._orthogonalize_replicated([here], of_slices)
            over_slices.give_back(here, whole)
        if over_shards is not None:
            over_shards.give_back(whole[0], held)

    def after_joining(self, shard: ShardUpdate, to_join: ToJoin, joined: Tensor) -> None:
        """Subtract orthogonal ``joined``, [shard_numel], from the masters."""
        parts = [_Part(whole, whole.start, 0, whole.numel) for whole in to_join.wholes]
        parts += [
            _Part(cut.whole, piece.in_shard, piece.in_param, piece.numel)
            for cut in to_join.cuts
            for rank, piece in cut.parts
            if to_join.ranks is not None and rank == to_join.ranks.rank
        ]
        self._subtract(shard, parts, joined.float(), to_join.slices)

    def _look_ahead(self, shard: ShardUpdate) -> Tensor:
        """Update the momentum. Returns the input of the iteration, [shard_numel] fp32. Rows that are not updated are
        undefined in it: nothing is subtracted from them either."""
        ahead = torch.empty_like(shard.grad, dtype=torch.float32)
        momentum = {part.name: shard.state[part.name] for part in parts_of(self.codecs, StateTensor(BUFFER))}
        look_ahead, _ = self._passes
        look_ahead.update([shard._replace(parameter=ahead, state=momentum)])
        return ahead

    def _subtract(
        self, shard: ShardUpdate, parts: Sequence[_Part], direction: Tensor, slices: Comm | None = None
    ) -> None:
        """Subtract ``direction``, [shard_numel] fp32, times rate and scale, from the masters. It is overwritten.

        ``parts``: the shard's parts of parameters. ``slices``: the ranks that have slices of them.
        """
        lr = self.columns.index("lr")
        for whole, start, in_param, numel in parts:
            scale = self._scale(whole, direction.device, slices)
            if isinstance(scale, Tensor):
                scale = scale.narrow(0, in_param, numel)
            direction.narrow(0, start, numel).mul_(shard.hyper[whole.param, lr] * scale)
        _, subtract = self._passes
        # The first pass has marked the gradients that are not finite. This one does not read them.
        subtract.update([shard._replace(state={**shard.state, "direction": direction}, marks=None)])

    def _scale(self, whole: Whole, device: torch.device, slices: Comm | None) -> float | Tensor:
        """Give the factor of the rate: one for the parameter, or, where its matrices differ in it, one for each
        element, [numel] as the parameter lies."""
        joint = whole.joint if self._is_slice(whole) else None
        shape, view = whole.shape if joint is None else joint.shape, whole.group.get(VIEW)
        scales = [scale_of(of_block, self.defaults["adjust_lr_fn"]) for of_block in shapes_of(shape, view)]
        if len({*scales}) == 1:
            return scales[0]
        by_element = torch.empty(shape, dtype=torch.float32, device=device)
        for block, scale in zip(blocks_of(by_element.view(matrices_of(shape)), view), scales, strict=True):
            block.fill_(scale)
        flat = torch.empty(whole.numel, dtype=torch.float32, device=device)
        if joint is None:
            whole.shaped(flat).copy_(by_element)
        else:
            assert slices is not None
            for in_whole, in_slice, length in joint.slices_of(slices.rank):
                own = by_element.narrow(joint.dim, in_whole, length)
                whole.shaped(flat).narrow(joint.dim, in_slice, length).copy_(own)
        return flat

    def _is_slice(self, whole: Whole) -> bool:
        """Whether other tensor-parallel ranks have slices of the same matrices."""
        return whole.joint is not None and self.needs_whole(whole.joint)

    def _places_of(self, shards: Sequence[ToJoin]) -> _Places:
        over_shards = over_slices = None
        if (ranks := shards[0].ranks) is not None:
            every = [(number, cut) for number, shard in enumerate(shards) for cut in shard.cuts]
            parts = [joined_parts(number, cut, self._cost(cut.whole), ranks.rank) for number, cut in every]
            over_shards = MatrixHomes(parts, ranks, "all_to_all")
        # The parameters that this rank has whole, or a slice of, by the tensor that they lie in.
        held = [shard.wholes for shard in shards] if over_shards is None else [over_shards.wholes]
        if (ranks := shards[0].slices) is not None:
            slices = [
                joined_slices(number, whole, self._cost(whole), ranks.rank)
                for number, wholes in enumerate(held)
                for whole in wholes
                if self._is_slice(whole)
            ]
            over_slices = MatrixHomes(slices, ranks, TENSOR_ALL_TO_ALL) if slices else None
        wholes = [[whole for whole in of_tensor if not self._is_slice(whole)] for of_tensor in held]
        of_slices = [] if over_slices is None else [over_slices.wholes]
        of_all, of_joined = (WorkSplit(of, self._cost, shards[0].replicas) for of in (wholes, of_slices))
        return _Places(over_shards, of_all, over_slices, of_joined)

    def cost(self, shape: tuple[int, ...]) -> int:
        """Count the multiplications of the iteration."""
        if len(shape) < 2:  # for a plan alone: an optimizer refuses such a parameter
            return super().cost(shape)
        matrices, rows, columns = matrices_of(shape)
        coefficients, steps, _, gram, _ = (self.defaults[name] for name in newton_schulz.OPTIONS)
        return matrices * newton_schulz.multiplications(rows, columns, coefficients, steps, gram)

    def _cost(self, whole: Whole) -> int:
        """Take the cost of the whole parameter also for a slice: so tensor-parallel ranks choose alike."""
        return self.cost(whole.shape if whole.joint is None else whole.joint.shape)

    def _orthogonalize_replicated(self, tensors: Sequence[Tensor], shares: WorkSplit) -> None:
        """Collective. ``_orthogonalize`` this rank's matrices, some at a time, and receive the other replicas'."""
        for tensor, wholes in zip(tensors, shares.own, strict=True):
            for run in split_runs(filter(_numel, wholes), _numel, _most(tensor)):
                self._orthogonalize(tensor, run)
        shares.exchange(tensors)

    def _orthogonalize(self, step: Tensor, wholes: Sequence[Whole]) -> None:
        """Orthogonalize each matrix in ``step``, flat, in place. Matrices of one shape are batched."""
        batches: dict[tuple[int, ...], list[Tensor]] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for whole in wholes:
            shaped = whole.shaped(whole.of(step))
            matrices = shaped.reshape(matrices_of(whole.shape))
            if whole.order is not None:  # of channels_last it is a copy
                copies.append((shaped, matrices))
            for block in blocks_of(matrices, whole.group.get(VIEW)):
                alike = tuple(block.shape[1:])
                # A matrix's bits must not depend on those beside it: the number of ranks decides which are here. So
                # matrices of several parameters are batched only where each has the bits that it has alone.
                alone = step.device.type != "cpu" or min(alike) < LEAST_TOGETHER
                first, *others = block.split(max(1, _most(step) // block[0].numel()))
                batches.setdefault((*alike, whole.param) if alone else alike, []).append(first)
                for part in others:
                    self._orthogonalize_batch([part])
        for batch in batches.values():
            self._orthogonalize_batch(batch)
        for shaped, matrices in copies:
            shaped.copy_(matrices.view(shaped.shape))

    def _orthogonalize_batch(self, blocks: Sequence[Tensor]) -> None:
        """Orthogonalize matrices of one shape in place."""
        together = torch.cat([*blocks]) if len(blocks) > 1 else blocks[0]
        options = [self.defaults[name] for name in newton_schulz.OPTIONS]
        made = newton_schulz.orthogonalized(together.squeeze(0), *options)  # one matrix by mm, as torch's Muon has it
        torch._foreach_copy_([*blocks], made.expand_as(together).split([len(block) for block in blocks]))


def _most(tensor: Tensor) -> int:
    """Give the most elements that are updated together, where ``tensor`` is."""
    return ON_A_PROCESSOR if tensor.device.type == "cpu" else ON_A_GPU


def scale_of(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Give the factor of the rate of a matrix of this shape.

    None and "original": sqrt(max(1, rows / columns)), by Jordan. "match_rms_adamw": 0.2 sqrt(max(rows, columns)), with
    which AdamW's rate and weight decay may stay (Liu et al., "Muon is Scalable for LLM Training", 2025).
    "spectral_unclamped": sqrt(rows / columns) (Bernstein, "Deriving Muon", 2025).
    """
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    ratio = rows / max(columns, 1)
    return math.sqrt(ratio if adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio))


def split_for_muon(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """See ``ShardedMuon.split``."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    embedded = {id(table.weight) for table in tables}
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Conv3d)]
    kernels = {id(module.weight) for module in convolutions[1:]}
    convolved = {id(p) for module in model.modules() if isinstance(module, _ConvNd) for p in module.parameters()}
    # A head without such a name is the only matrix as tall as the vocabulary. Those of blocks come several times.
    vocabulary = max((table.num_embeddings for table in tables), default=None)
    tall = [p for p in model.parameters() if p.dim() == 2 and p.shape[0] == vocabulary and id(p) not in embedded]
    heads = {id(p) for p in tall if len(tall) == 1}
    matrices: list[tuple[str, nn.Parameter]] = []
    others: list[tuple[str, nn.Parameter]] = []
    for name, parameter in model.named_parameters():
        in_head = name.split(".")[-2:-1] in [[head] for head in _HEADS]
        stacked = parameter.dim() == 2 or (parameter.dim() == 3 and parameter.shape[0] > 1)
        plain = stacked and id(parameter) not in embedded | convolved | heads
        hidden = plain or id(parameter) in kernels
        (matrices if hidden and not in_head else others).append((name, parameter))
    return matrices, others


# -- the matrices of a parameter: see ``MatrixView`` -----------------------------------------------------------------


def matrices_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Give (matrices, rows, columns) of a parameter of 2 to 5 dimensions: the same elements in the same order."""
    if len(shape) == 3:
        return (shape[0], shape[1], shape[2])
    return (1, shape[0], math.prod(shape[1:]))


def refuse_view(shape: Sequence[int], view: Mapping[str, Any] | None) -> str | None:
    """Return why a parameter of this shape has no such matrices, and what to do. None: it has."""
    if not 2 <= len(shape) <= 5:
        return (
            f"has {len(shape)} dimensions, and Muon makes matrices orthogonal: give it to a group with another rule, "
            '{"params": others, "rule": rules.AdamW()}, as embeddings, heads, norms and biases. '
            "ShardedMuon.split(model) sorts them"
        )
    if view is None:
        return None
    ((cut, blocks),) = view.items()
    length = matrices_of(shape)[_DIMS[cut]]
    fits = length % blocks == 0 if isinstance(blocks, int) else length == sum(blocks)
    if fits:
        return None
    wanted = f"a number that divides {length}" if isinstance(blocks, int) else f"lengths that add up to {length}"
    return f"has {length} {cut} by its shape {tuple(shape)}, and its group has view={dict(view)!r}: give {wanted}"


def blocks_of(matrices: Tensor, view: Mapping[str, Any] | None) -> list[Tensor]:
    """Cut ``matrices``, contiguous [matrices, rows, columns], into those that ``view`` names: views [n, rows, columns]
    of n matrices, each of which is to be made orthogonal by itself."""
    if view is None:
        return [matrices]
    ((cut, blocks),) = view.items()
    count, length, columns = matrices.shape
    if cut == ROWS and isinstance(blocks, int):
        return [matrices.view(count * blocks, length // blocks, columns)]
    lengths = matrices.shape[_DIMS[cut]] // blocks if isinstance(blocks, int) else [*blocks]
    return list(matrices.split(lengths, _DIMS[cut]))


def shapes_of(shape: Sequence[int], view: Mapping[str, Any] | None) -> list[tuple[int, int]]:
    """Give (rows, columns) of each of ``blocks_of``, for a parameter of this shape."""
    _, rows, columns = matrices_of(shape)
    if view is None:
        return [(rows, columns)]
    ((cut, blocks),) = view.items()
    length = rows if cut == ROWS else columns
    lengths = [length // blocks] * (1 if cut == ROWS else blocks) if isinstance(blocks, int) else blocks
    return [(block, columns) if cut == ROWS else (rows, block) for block in lengths]
