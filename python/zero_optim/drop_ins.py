"""Drop-ins for torch's optimizers: ``ShardedOptimizer`` with a rule, and the arguments of torch's class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .optimizer import ShardedOptimizer
from .rules.kernel_rule import SGD, AdamW, Lion
from .rules.muon import Muon, split_for_muon
from .rules.newton_schulz import QUINTIC
from .settings import ShardingOptions, shows_options
from .validate import warn_of_meaningless

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ShardedAdamW(ShardedOptimizer):
    """``torch.optim.AdamW``, sharded.

    Args:
        params: as ``ShardedOptimizer`` takes them.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.AdamW``; a group's own values win; read at
            every step. ``amsgrad`` is the same for all groups.
        decoupled_weight_decay: False makes it ``torch.optim.Adam``, with L2 in the gradient.
        fused, foreach, capturable: accepted for torch's sake, and without effect: every update is all three.
        sharding: the options of ``ShardedOptimizer``, by keyword.

    Raises what ``ShardedOptimizer`` raises.
    """

    @shows_options
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        decoupled_weight_decay: bool = True,
        **sharding: Unpack[ShardingOptions],
    ) -> None:
        warn_of_meaningless(type(self).__name__, {"fused": fused, "foreach": foreach, "capturable": capturable})
        rule = AdamW(
            decoupled_weight_decay,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            differentiable=differentiable,
        )
        super().__init__(params, rule, **sharding)


class ShardedAdam(ShardedAdamW):
    """``torch.optim.Adam``, sharded: ``ShardedAdamW`` with Adam's defaults, and L2 in the gradient."""

    @partial(shows_options, base=ShardedAdamW)
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **others: Any,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, decoupled_weight_decay=decoupled_weight_decay, **others
        )


class ShardedLion(ShardedOptimizer):
    """Lion (Chen et al., 2023), sharded: one momentum, and updates by its sign.

    Args:
        params, sharding: as ``ShardedAdamW`` takes them.
        lr, betas, weight_decay: of the paper. Use a learning rate 3 to 10 times smaller than AdamW's, and a weight
            decay as many times larger.
        maximize: climb instead.

    Raises what ``ShardedOptimizer`` raises.
    """

    @shows_options
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        **sharding: Unpack[ShardingOptions],
    ) -> None:
        super().__init__(params, Lion(lr=lr, betas=betas, weight_decay=weight_decay, maximize=maximize), **sharding)


class ShardedSGD(ShardedOptimizer):
    """``torch.optim.SGD``, sharded.

    Args:
        params, sharding: as ``ShardedAdamW`` takes them.
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in ``torch.optim.SGD``. Where no group has a
            momentum as the optimizer is made, there are no momentum buffers, and none can get one later.
        foreach, fused: accepted for torch's sake, and without effect: every update is both.

    Raises what ``ShardedOptimizer`` raises.
    """

    @shows_options
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        **sharding: Unpack[ShardingOptions],
    ) -> None:
        warn_of_meaningless(type(self).__name__, {"foreach": foreach, "fused": fused})
        rule = SGD(
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            differentiable=differentiable,
        )
        super().__init__(params, rule, **sharding)


class ShardedMuon(ShardedOptimizer):
    """``torch.optim.Muon``, sharded: for the matrices of hidden layers. From stage 1 on each matrix is made orthogonal
    on one of the ranks over which it is sharded; one that is cut over tensor-parallel ranks, on one of these. The
    result does not depend on how many ranks there are, nor on the stage.

    A parameter of three dimensions is a stack of matrices; of four and five, a convolution, [out, the rest]. ``view``
    of a parameter group cuts its matrices: None, or ``{"rows": blocks}`` or ``{"columns": blocks}``, where ``blocks``
    is the number of equal ones, or the length of each. It means the whole matrix, also where a rank has a slice. A load
    does not change it.

    Args:
        params, sharding: as ``ShardedAdamW`` takes them. Put all but hidden matrices in a group with another rule:
            ``{"params": others, "rule": rules.AdamW(lr=3e-4)}``. Plain slices need ``partition_dim``; see docs/muon.md.
        lr, weight_decay, momentum, nesterov: as in ``torch.optim.Muon``; a group's own values win. All other arguments
            are the same for all groups.
        ns_coefficients, eps, ns_steps: of the Newton-Schulz iteration. Three coefficients, or three for each step, as
            ``zero_optim.rules.newton_schulz.POLAR_EXPRESS`` with ``ns_steps=6``.
        adjust_lr_fn: how the rate depends on a matrix's shape: None, "original", "match_rms_adamw" or
            "spectral_unclamped"; see ``zero_optim.rules.muon.scale_of``.
        ns_gram: whether matrices with more than two columns a row, or rows a column, are made orthogonal with fewer
            multiplications. Otherwise the operations are torch's, one by one.
        ns_product: what computes the symmetric products: "torch", or "triton", a kernel for GPUs that calculates half
            of each, for matrices with 4096 rows and columns or more. State loads from one into the other.
        ns_replicas: whether ranks that hold the same matrices, at stage 0 or as replicas of a mesh, "share" the work
            and send the results, or "repeat" it, with the same bits. With state off the device, below stage 3, they
            repeat it. See docs/muon.md for when that pays.

    Raises what ``ShardedOptimizer`` raises; ParameterError also for a parameter that is no matrix, or has not the
    blocks of its view.
    """

    @shows_options
    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] | Sequence[tuple[float, float, float]] = QUINTIC,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        ns_gram: bool = True,
        ns_product: str = "torch",
        ns_replicas: str = "share",
        **sharding: Unpack[ShardingOptions],
    ) -> None:
        rule = Muon(
            lr=lr,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
            ns_gram=ns_gram,
            ns_product=ns_product,
            ns_replicas=ns_replicas,
        )
        super().__init__(params, rule, **sharding)

    @staticmethod
    def split(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
        """Sort the parameters of ``model`` into those for Muon and the others, which AdamW or Lion takes, each with its
        name: ``matrices, others = ShardedMuon.split(model)``.

        The others are embeddings, heads, the first convolution, convolutions of one dimension and transposed ones, and
        all that is no matrix, stack of matrices or convolution. A head is the weight of a module that is called head,
        lm_head, output, classifier or score, or the only matrix with as many rows as the largest embedding.
        """
        return split_for_muon(model)
