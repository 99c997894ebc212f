"""``ZERO_OPTIM_DEBUG=poison`` fills communication buffers with NaN when they are released.

That NaN reaches no result is among what ``random_programs`` try.
"""

from __future__ import annotations

import pytest
import torch
import zero_optim
from harness import run_ranks
from training_cases import ROW, TINY_CAP_MB, debugging, linear_backward, make_gradients, make_parameters


def _buffers(rank: int, world_size: int, poison: bool, later: bool) -> list[bool]:
    """Whether each communication buffer is NaN after a step; ``later``: the variable is set after construction."""
    params = make_parameters(((11, ROW),) * 6)  # no multiple of the ranks: they are packed
    with debugging(poison and not later):
        opt = zero_optim.ShardedAdamW(params, stage=2, bucket_cap_mb=TINY_CAP_MB)
    with debugging(poison):
        for step in range(2):
            linear_backward(params, make_gradients(params, rank, step))
            opt.step()
            opt.zero_grad()
    storages = opt.engine.reducer.rounds.buffers.storages
    found = [bool(storage.view(torch.float32)[: 11 * ROW].isnan().all()) for storage in storages]
    opt.close()
    return found


def test_the_environment_poisons_what_is_released_if_it_says_so_at_construction() -> None:
    assert run_ranks(2, _buffers, True, False) == [[True, True]] * 2
    assert run_ranks(2, _buffers, True, True) == [[False, False]] * 2
    assert run_ranks(2, _buffers, False, False) == [[False, False]] * 2


def test_an_option_of_the_environment_that_does_not_exist_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_OPTIM_DEBUG", "poisson")
    with pytest.raises(ValueError, match="ZERO_OPTIM_DEBUG.*poisson"):
        zero_optim.ShardedAdamW(make_parameters(((3,),)))
