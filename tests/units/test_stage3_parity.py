"""Stage 3 computes what stage 2 does, bit for bit. ``face/test_bits_of_topologies.py`` has both against the oracle."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from cells import slow
from harness import run_ranks
from sharded_cases import Outcome, Run, losses_and_states
from torch import Tensor
from training_cases import difference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ACCUMULATIONS = ((1, False), (3, True), (2, False))  # micro-batches; whether all but the last are under no_sync
PREFETCH = (0, 1, 3)


def parts(outcome: Outcome) -> list[Tensor]:
    """All that must be equal bit for bit, in one order."""
    losses = torch.tensor(outcome.losses, dtype=torch.float64)
    state = [tensor for index in sorted(outcome.state) for tensor in outcome.state[index].values()]
    return [losses, *outcome.parameters.values(), *state]


def assert_as_stage_2(results: Sequence[Sequence[Outcome]], runs: Sequence[Run]) -> None:
    """On each rank, the outcome of each run is that of the first run before it at stage 2."""
    failures = []
    for rank, outcomes in enumerate(results):
        expected = outcomes[0]
        for run, outcome in zip(runs, outcomes, strict=True):
            if run.stage == 2:
                expected = outcome
                continue
            assert outcome.parameters.keys() == expected.parameters.keys()
            assert {index: entry.keys() for index, entry in outcome.state.items()} == {
                index: entry.keys() for index, entry in expected.state.items()
            }
            if found := difference(parts(outcome), parts(expected)):
                failures.append(f"{run}, rank {rank}: {found}")
    assert not failures, "\n".join(failures)


def _matrix(world_size: int, dtype: torch.dtype) -> list[Run]:
    """Every accumulation, at stages 2 and 3. Over the dtypes, each meets each way to reshard and each prefetch."""
    reshards = (True, False, 2 if world_size == 4 else True)
    runs = []
    for number, (micro, no_sync) in enumerate(ACCUMULATIONS):
        turn = number + DTYPES.index(dtype)
        shard = {"reshard_after_forward": reshards[turn % 3], "prefetch": PREFETCH[(turn + number) % 3]}
        options = {"weight_decay": 0.1, "overlap_grad_reduce": (turn + world_size) % 2 == 0}
        run = Run(dtype=dtype, steps=2, micro=micro, no_sync=no_sync, shard=shard, options=options)
        runs += [run.at(2), run]
    return runs


# Four ranks alone have each way to reshard, and meet each dtype.
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [
        *((1, torch.bfloat16), (3, torch.float32)),
        *((4, dtype) for dtype in DTYPES),
        *(pytest.param(2, dtype, marks=slow) for dtype in DTYPES),
    ],
)
def test_every_cell_equals_stage_2_bit_for_bit(world_size, dtype):
    runs = _matrix(world_size, dtype)
    assert_as_stage_2(run_ranks(world_size, losses_and_states, runs, timeout=120), runs)
