"""The sum of gloo's reduce-scatter: in fp32, in rank order, rounded once, wherever it goes; errors of sums in bf16."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from zero_optim.comm import transport

NUMEL = 23


def _parts(ranks: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(ranks)
    scales = 10 ** torch.linspace(-3, 3, NUMEL)  # so that order and rounding show
    return [(torch.randn(NUMEL, generator=generator) * scales).to(dtype) for _ in range(ranks)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("at_once", [1, 7, NUMEL, 100])
def test_it_is_the_fp32_sum_rounded_once(dtype, ranks, at_once, monkeypatch):
    monkeypatch.setattr(transport, "SUMMED_AT_ONCE", at_once)
    parts = _parts(ranks, dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    for place in range(ranks):  # one is received where the sum will be; or the own one is there
        given = [part.clone() for part in parts]
        transport.sum_in_rank_order(given, given[place], False)
        assert torch.equal(given[place], total.to(dtype)), place
    there = _parts(1, dtype)[0]
    out = there.clone()
    transport.sum_in_rank_order([part.clone() for part in parts], out, True)
    assert torch.equal(out, there + total.to(dtype))
    wider = torch.empty(NUMEL)
    transport.sum_in_rank_order([part.clone() for part in parts], wider, False)
    assert torch.equal(wider, total.to(dtype).float())


def _errors(ranks: int, numel: int = 2**18) -> tuple[float, float]:
    """RMS of what the average of bf16 gradients is off by, as a fraction of its own, rounded by each rank and once."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(ranks, numel, generator=generator, dtype=torch.float64).bfloat16()
    exact = gradients.double().mean(0)
    parts = list((gradients / ranks).unbind())
    ring = parts[0]
    for part in parts[1:]:
        ring = ring + part
    once = torch.empty(numel, dtype=torch.bfloat16)
    transport.sum_in_rank_order([part.clone() for part in parts], once, False)
    rms = exact.square().mean().sqrt()
    by_each, by_one = (float((found.double() - exact).square().mean().sqrt() / rms) for found in (ring, once))
    return by_each, by_one


def test_the_errors_in_the_docs() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "averaging.md").read_text().split())
    found = re.search(
        r"over N = (\d+), (\d+), (\d+) ranks is off by ([\d.]+) %, ([\d.]+) %, ([\d.]+) %"
        r".* by ([\d.]+) % if it is rounded once",
        text,
    )
    assert found is not None
    *numbers, once = found.groups()
    for ranks, documented in zip(map(int, numbers[:3]), map(float, numbers[3:]), strict=True):
        by_each, by_one = _errors(ranks)
        assert round(100 * by_each, 2) == documented
        assert round(100 * by_one, 2) == pytest.approx(float(once), abs=0.015)
