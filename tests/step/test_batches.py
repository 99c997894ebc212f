"""Which shards one call updates: neighbours that are alike, up to so many elements; what is left of one that fails."""

from __future__ import annotations

import sys
import traceback
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import zero_optim
from torch import nn
from zero_optim import OffloadError
from zero_optim.rules import homes
from zero_optim.rules.kernel_rule import AdamW
from zero_optim.step import batches
from zero_optim.step.batches import JoinedBatch, LostState, ShardBatch, batches_of
from zero_optim.step.workplace import Coefficients

import zero_kernels
from zero_kernels import dispatch

SHARDS = 5
MOST = {"cpu": batches.ON_A_PROCESSOR, "cuda": batches.ON_A_GPU}


class Rule:
    joined_in = torch.float32

    def __init__(self, fails: bool = False) -> None:
        self.fails, self.updated = fails, []

    def prepared(self) -> Rule:
        return self

    def update(self, shards: list[Shard]) -> None:
        self.updated.append(list(shards))
        if self.fails:
            raise OSError

    def before_joining(self, shard: Shard) -> torch.Tensor:
        if self.fails:
            raise OSError
        return torch.full((shard.numel,), float(shard.numel))

    def join(self, held: list[torch.Tensor], shards: list[Any]) -> None:
        self.updated.append([tensor.tolist() for tensor in held])
        for tensor in held:
            tensor.neg_()

    def after_joining(self, shard: Shard, to_join: Any, joined: torch.Tensor) -> None:
        assert to_join == shard.to_join
        self.updated.append(joined.tolist())


class Ranks:
    def __init__(self, world_size: int) -> None:
        self.world_size = world_size


NOBODY = (None, None, None)


class ToJoin(NamedTuple):
    """As much of the rules' ``ToJoin`` as a batch asks for."""

    ranks: Ranks | None
    slices: Ranks | None
    replicas: Ranks | None


@dataclass
class Shard:
    """As much of a ``ShardState`` as a batch asks for."""

    numel: int
    dtypes: str = "bf16"
    device: torch.device = torch.device("cpu")
    fails: str = ""
    rule: Rule = field(default_factory=Rule)
    joining: tuple[Ranks | None, Ranks | None, Ranks | None] = NOBODY
    params: int = 1
    lookahead: int = 0
    done: list[str] = field(default_factory=list)

    keeps_views = True

    @property
    def to_join(self) -> ToJoin | None:
        return None if self.joining == NOBODY else ToJoin(*self.joining)

    @property
    def bucket(self) -> Any:
        return SimpleNamespace(layout=SimpleNamespace(shards=SHARDS), sharding=SimpleNamespace(device=self.device))

    @property
    def parameters(self) -> list[int]:
        return [self.numel] * self.params

    def prefetch(self) -> None:
        self.done.append("prefetch")
        if self.fails == "lost early":
            raise OffloadError("gone")

    @property
    def kind(self) -> tuple[object, ...]:
        return self.dtypes, *self.joining

    def begin_update(self, by: Any) -> Any:
        self.done.append("begin")
        if self.fails == "begin":
            raise OSError
        if self.fails.startswith("lost"):
            raise OffloadError("gone")
        return self

    def end_pass(self) -> None:
        self.done.append("end of a pass")

    def end_update(self) -> None:
        self.done.append("end")

    def give_up_update(self) -> None:
        self.done.append("give up")


def sizes_of(shards: list[Shard]) -> list[list[int]]:
    return [[shard.numel for shard in batch.shards] for batch in batches_of(shards, LostState())]


@pytest.mark.parametrize("device", MOST)
def test_neighbours_are_together_up_to_so_many_elements(device):
    half = MOST[device] // 2
    sizes = [half, half, half, 1, half, 2 * half, 0, 2 * half + 1, 5, 5]
    shards = [Shard(size, device=torch.device(device)) for size in sizes]
    assert sizes_of(shards) == [[half, half], [half, 1], [half], [2 * half, 0], [2 * half + 1], [5, 5]]
    assert sizes_of([]) == []


def test_other_dtypes_are_apart_and_the_order_stays():
    shards = [Shard(size, dtypes) for size, dtypes in ((1, "bf16"), (2, "bf16"), (3, "fp32"), (4, "bf16"), (5, "bf16"))]
    assert sizes_of(shards) == [[1, 2], [3], [4, 5]]


def test_what_is_made_whole_comes_first_and_is_alike():
    big, ranks = 2 * MOST["cpu"], (Ranks(2), None, None)
    shards = [Shard(1), Shard(big, joining=ranks), Shard(2), Shard(3, "fp32", joining=ranks)]
    shards += [Shard(big, joining=ranks), Shard(4), Shard(5, joining=(ranks[0], Ranks(2), None))]
    assert sizes_of(shards) == [[big, big], [3], [5], [1, 2, 4]]


@pytest.mark.parametrize(
    ("joining", "ranks"),
    [
        ((Ranks(4), None, None), 4),
        ((Ranks(4), Ranks(3), None), 12),
        ((None, Ranks(3), None), 3 * SHARDS),
        ((None, None, Ranks(8)), SHARDS),
        ((Ranks(4), None, Ranks(8)), 4),
    ],
)
def test_what_is_made_whole_is_cut_where_both_parts_are_worth_it(joining, ranks, monkeypatch):
    """Below stage 3 a rank has the parameters of its shard alone. For replicas a batch is no larger."""
    monkeypatch.setattr(homes, "JOINED_ON_A_PROCESSOR", 100)
    enough = homes.PARAMETERS_A_RANK * ranks
    shard = partial(Shard, joining=joining)
    assert sizes_of([shard(100, params=enough)] * 3) == [[100]] * 3
    assert sizes_of([shard(99, params=enough)] * 3) == [[99] * 3]
    assert sizes_of([shard(99, params=enough)] * 4) == [[99, 99]] * 2
    assert sizes_of([shard(100, params=enough - 1)] * 3) == [[100] * 3]
    assert sizes_of([shard(100, params=enough - 1)] * 5) == [[100, 100], [100] * 3]


def joined_batch(shards: list[Shard]) -> tuple[JoinedBatch, LostState]:
    for shard in shards:
        shard.rule, shard.joining = shards[0].rule, (Ranks(2), None, None)
    lost = LostState()
    return JoinedBatch(shards, lost), lost


BY = Coefficients({}, None, *[torch.zeros(1)] * 3)


def test_pages_come_before_parameters_are_whole_and_after():
    shards = [Shard(1, lookahead=1), Shard(2, lookahead=1)]
    batch, _ = joined_batch(shards)
    batch.prefetch()
    batch.update(BY)
    assert shards[0].rule.updated == [[[1], [2, 2]], [-1], [-2, -2]]
    assert [shard.done for shard in shards] == [["prefetch", "begin", "end of a pass", "prefetch", "begin", "end"]] * 2


def test_a_pass_that_fails_leaves_no_page_fetched():
    shards = [Shard(1, rule=Rule(fails=True)), Shard(2)]
    batch, _ = joined_batch(shards)
    with pytest.raises(OSError):
        batch.update(BY)
    assert [shard.done for shard in shards] == [["begin", "give up"], []]


def test_an_update_that_fails_leaves_no_page_fetched():
    shards = [Shard(1), Shard(2, fails="begin"), Shard(3)]
    with pytest.raises(OSError):
        ShardBatch(shards, LostState()).update(BY)
    assert [shard.done for shard in shards] == [["begin", "give up"], ["begin"], []]
    shards = [Shard(size, rule=Rule(fails=True)) for size in (1, 2)]
    with pytest.raises(OSError):
        ShardBatch(shards, LostState()).update(BY)
    assert [shard.done for shard in shards] == [["begin", "give up"]] * 2
    assert ShardBatch(shards, LostState()).parameters == [1, 2]


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 6, (torch.bfloat16, torch.float32) * 3, (torch.float32,) * 6])
def test_batches_and_single_shards_give_the_same_bits(dtypes, monkeypatch):
    """Buckets of fp32 and of bf16; parameters of both take part in one step, and one is not used."""

    def trained(most: int) -> list[torch.Tensor]:
        monkeypatch.setattr(batches, "ON_A_PROCESSOR", most)
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(300 + 130 * i).to(dtype)) for i, dtype in enumerate(dtypes)]
        opt = zero_optim.ShardedAdamW(parameters, lr=1e-2, bucket_cap_mb=0.001, max_grad_norm=0.5)
        together = {len(batch.shards) for batch in opt.engine.states._batches}
        assert together == {1} if most == 0 else max(together) > 1 or len(set(dtypes)) > 1
        for step in range(3):
            for i, parameter in enumerate(parameters):
                parameter.grad = None if i == 1 and step == 1 else torch.randn_like(parameter)
            opt.step()
        tensors = [p.detach() for p in parameters]
        state = opt.state_dict()["state"]
        tensors += [value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor)]
        opt.close()
        return tensors

    for one, other in zip(trained(0), trained(2**16), strict=True):
        assert torch.equal(one, other)


def test_a_prepared_rule_updates_as_the_rule():
    assert not AdamW(decoupled=False).prepared().decoupled


def test_from_a_step_to_its_op_it_is_five_frames(monkeypatch: pytest.MonkeyPatch):
    """Of the packages' own; torch adds that of ``torch.compiler.disable``."""
    opt = zero_optim.ShardedAdamW([nn.Parameter(torch.ones(4))])
    roots = tuple(str(Path(str(package.__file__)).parent) for package in (zero_optim, zero_kernels))
    ways: list[list[str]] = []

    def op(*args: Any) -> None:
        frames = traceback.extract_stack(sys._getframe(1))
        ways.append([frame.name for frame in frames if frame.filename.startswith(roots)])

    monkeypatch.setattr(dispatch, "compiled_overload", lambda *args: op)
    opt.step()
    assert ways == [["step", "step", "update", "update", "__call__"]]
