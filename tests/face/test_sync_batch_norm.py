"""SyncBatchNorm beside the optimizer's own collectives: one process on the whole batch gives the same.

The CPU has a stand-in for it, see ``batch_norm_cases``; torch's own is tested on a GPU, in ``tests/gpu``.
"""

from __future__ import annotations

import pytest
import torch
from batch_norm_cases import LR, STEPS, train_in_one_process, train_on_ranks
from harness import run_ranks
from oracle import adamw_bound
from training_cases import assert_bitwise

EPS = 1e-3  # far above the rounding noise of gradients that are nearly zero, and below the others


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_batch_norm_over_all_ranks(stage: int) -> None:
    expected, statistics = train_in_one_process(2, EPS)
    (weights, buffers), (weights_1, buffers_1) = run_ranks(2, train_on_ranks, stage, "cpu", EPS)
    assert_bitwise(weights_1, weights)
    assert_bitwise(buffers_1, buffers)
    for ours, theirs in zip(weights, expected, strict=True):
        assert ((ours - theirs).abs() <= 4 * adamw_bound(theirs, LR, STEPS)).all()
    for ours, theirs in zip(buffers, statistics, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
