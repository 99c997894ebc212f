"""The options that every sharded optimizer has, beside its parameters and its rule: types, defaults and checks."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, TypeVar

import torch
import torch.distributed as dist

from .comm.topology import STATE_OVER
from .rules.codec import MASTERS, STATE_DTYPES, codecs_for, default_master
from .rules.options import EMA_DECAY, Decays, check_choice, listed_decays
from .rules.update_rule import UpdateRule
from .stores.offload import Offload, read_offload
from .validate import PARAMETER_DTYPES

Init = TypeVar("Init", bound=Callable[..., None])

# Ranks may write these in different ways: the described state shows what they come to.
_MAY_DIFFER = ("ema_decay", "master", "state_dtype")


class RankOptions(TypedDict, total=False):
    """The options that name ranks; None by default."""

    process_group: dist.ProcessGroup | None
    mesh: dist.DeviceMesh | None
    tensor_parallel: dist.DeviceMesh | dist.ProcessGroup | None
    pipeline: dist.DeviceMesh | dist.ProcessGroup | None


class ShardingOptions(RankOptions, total=False):
    """The keyword arguments that every sharded optimizer has. ``ShardedOptimizer`` documents them, ``Settings`` has
    their defaults."""

    stage: int | None
    state_over: str
    bucket_cap_mb: float | None
    grad_reduce_dtype: torch.dtype | None
    grad_accumulation_dtype: torch.dtype | None
    max_grad_norm: float | None
    skip_nonfinite: bool
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    state_offload: str | None
    device_budget: int | str | None
    ema_decay: float | Sequence[float] | None
    master: str | None
    state_dtype: str
    telemetry_every: int | None
    check_replicas_every: int | None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of ``ShardingOptions``, without ranks, as they were given or by default."""

    stage: int  # by default 3 for a sharded model, else 2
    state_over: str = "shard"
    bucket_cap_mb: float | None = None
    grad_reduce_dtype: torch.dtype | None = None
    grad_accumulation_dtype: torch.dtype | None = None
    max_grad_norm: float | None = None
    skip_nonfinite: bool = True
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    state_offload: str | None = None
    device_budget: int | str | None = None
    ema_decay: float | Sequence[float] | None = None
    master: str | None = None
    state_dtype: str = "fp32"
    telemetry_every: int | None = None
    check_replicas_every: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], *, default_stage: int) -> Settings:
        """Take the settings out of an optimizer's keyword arguments; None as ``stage`` is the default."""
        own = {name: value for name, value in options.items() if name not in RankOptions.__annotations__}
        stage = own.pop("stage", None)
        return cls(stage=default_stage if stage is None else stage, **own)

    def check(self) -> None:
        """Raise ValueError for the first option that is out of range."""
        cap, norm, accumulation_dtype = self.bucket_cap_mb, self.max_grad_norm, self.grad_accumulation_dtype
        self._check("stage", type(self.stage) is int and 0 <= self.stage <= 3, "0, 1, 2 or 3")
        self._check("bucket_cap_mb", cap is None or 0 < cap < math.inf, "None or positive (MiB)")
        check_choice("state_over", self.state_over, STATE_OVER)
        if self.state_over == "all" and self.stage == 0:
            raise ValueError('state_over="all" with stage=0, which shards no state: take another, or leave it out')
        reduced_in = (None, *PARAMETER_DTYPES)
        self._check("grad_reduce_dtype", self.grad_reduce_dtype in reduced_in, f"None or one of {PARAMETER_DTYPES}")
        self._check("grad_accumulation_dtype", accumulation_dtype in (None, torch.float32), "None or torch.float32")
        self._check("max_grad_norm", norm is None or norm > 0, "None or positive")
        for name in ("telemetry_every", "check_replicas_every"):
            every = getattr(self, name)
            self._check(name, every is None or (type(every) is int and every > 0), "None or a number of steps")
        check_choice("master", self.master, (None, *MASTERS))
        check_choice("state_dtype", self.state_dtype, STATE_DTYPES)
        read_offload(self.state_offload, self.device_budget)

    def _check(self, name: str, fits: bool, range_of_values: str) -> None:
        if not fits:
            raise ValueError(f"{name} must be {range_of_values}, got {getattr(self, name)!r}")

    @property
    def offload(self) -> Offload:
        """Where the state lives."""
        return read_offload(self.state_offload, self.device_budget)

    def applied_to(self, rule: UpdateRule, groups: Sequence[Mapping[str, Any]], *, plain_slices: int = 1) -> UpdateRule:
        """Make ``rule`` ready for its first parameter groups, with state in the form that was asked for, and averages.

        ``plain_slices``: see ``UpdateRule``.
        """
        rule = rule.for_groups(groups)
        master = self.master or default_master(tensor.dtype for group in groups for tensor in group["params"])
        codecs = codecs_for(rule.tensors, rule.nonnegative, master, self.state_dtype)
        rule = rule.with_codecs(codecs | {**rule.codecs})  # a copy
        rule.plain_slices = plain_slices
        if self.ema_decay is not None:
            rule = rule.with_averages(Decays(EMA_DECAY, listed_decays(self.ema_decay)))
        rule.check()
        return rule

    def described(self) -> dict[str, Any]:
        """Describe the options, by name, for all ranks to agree on, beside the rules as they were applied."""
        given = {name: value for name, value in vars(self).items() if name not in _MAY_DIFFER}
        return {**given, "state_offload": self.offload.tier.value}  # each rank may have a disk of its own


def shows_options(init: Init, base: type | None = None) -> Init:
    """Show in the signature of a constructor, for ``help`` and editors, what it takes as ``**kwargs``: the options, or
    the keyword-only arguments of the class ``base``, options included."""
    *own, kwargs = inspect.signature(init).parameters.values()
    kind, names = inspect.Parameter.KEYWORD_ONLY, {parameter.name for parameter in own}
    assert kwargs.kind is inspect.Parameter.VAR_KEYWORD
    defaults = {field.name: field.default for field in fields(Settings) if field.name != "stage"}
    options = [
        inspect.Parameter(name, kind, default=defaults.get(name), annotation=getattr(hint, "__forward_arg__", hint))
        for name, hint in ShardingOptions.__annotations__.items()
    ]
    more = options if base is None else inspect.signature(base).parameters.values()
    shown = [parameter for parameter in more if parameter.kind is kind and parameter.name not in names]
    init.__signature__ = inspect.Signature([*own, *shown], return_annotation="None")  # type: ignore[attr-defined]
    return init


def check_keywords(optimizer: type, base: type, given: Iterable[str]) -> None:
    """Raise TypeError for the first keyword argument that none of ``optimizer``'s classes, up to ``base``, has."""
    unknown = next((keyword for keyword in given if keyword not in ShardingOptions.__annotations__), None)
    if unknown is None:
        return
    classes = [cls for cls in optimizer.__mro__ if issubclass(cls, base)]
    known = [*dict.fromkeys(name for cls in classes for name in inspect.signature(cls).parameters)]
    near = difflib.get_close_matches(unknown, known, n=1)
    meant = [*near, *(other for other in known if other.endswith(f"_{unknown}"))][:1]
    hint = f"; did you mean {meant[0]}?" if meant else ""
    raise TypeError(f"{optimizer.__name__} has no argument {unknown!r}{hint}")
