"""`row_stats` of `foreach_step` and `update_rows`: the written arithmetic, and the same bits on every backend."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from kernel_cases import FLOATS, ISAS, Shards, backend, rule_table, same_bits, threads
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, ROW_STATS, RULES, columns_of, update_rows

SIZES = (4097, 1, 0, 127, 128, 129, 7)
PAIRS = [(grad, param, i % 2 * 3) for i, (grad, param) in enumerate((g, p) for g in FLOATS for p in (*FLOATS, None))]
every_backend = pytest.mark.parametrize("name", ["reference", *ISAS])


def measured(shards: Shards, name: str, **shared: Tensor) -> list[Tensor]:
    """What the named backend makes of rows that held something else before; the update is that without `row_stats`."""
    stats = [torch.full((-(-grad.numel() // ROW), len(ROW_STATS)), 7.0) for grad in shards.grads]
    assert all(map(same_bits, shards.run(name, **shared), shards.run(name, row_stats=stats, **shared)))
    return stats


def test_threads_share_rows_without_changing_a_bit() -> None:
    shards = Shards("adamw", (0, 3 * ROW, 100_003, 77_777), torch.bfloat16, torch.bfloat16, calm=True)
    want = measured(shards, "reference")
    for isa in ISAS:
        with threads(3):
            assert all(map(same_bits, want, measured(shards, isa))), isa


def in_order(terms: np.ndarray) -> np.float32:
    """The sum of 128 fp32 terms as docs/ops.md writes it, an addition at a time."""
    lines = [[np.float32(x) for x in terms[k * 16 : k * 16 + 16]] for k in range(8)]
    while len(lines) > 1:
        lines = [[a + b for a, b in zip(lines[k], lines[k + 1], strict=True)] for k in range(0, len(lines), 2)]
    (line,) = lines
    for h in (8, 4, 2, 1):
        line = [line[j] + line[j + h] for j in range(h)]
    return line[0]


@every_backend
def test_the_numbers_are_those_of_the_docs(name: str) -> None:
    """Of AMSGrad, which has the most states: whole rows and a tail, padding, and a slot that is not active."""
    shards = Shards("amsgrad", (5 * ROW + 40,), torch.float16, torch.bfloat16, calm=True)
    shards.row_slots[0] = torch.tensor([0, 2, -1, 3, 1, 2], dtype=torch.int32)
    shards.grads[0][: 3 * ROW : 2] = 0.0
    shards.grads[0][5] = -0.0
    (stats,) = measured(shards, name)
    before, after = shards.masters[0].numpy(), shards.run(name)[0].numpy()
    factors = shards.table[:, RULES["amsgrad"].columns.index("grad_factor")].numpy()
    for row, slot in enumerate(shards.row_slots[0].tolist()):
        at = slice(row * ROW, (row + 1) * ROW)
        if slot in (-1, 3):
            assert stats[row].tolist() == [0.0] * 5
            continue
        g = shards.grads[0].numpy()[at].astype(np.float32) * (np.float32(0.37) * factors[slot])
        u, p = after[at] - before[at], after[at]
        squares = [in_order(np.pad(x * x, (0, ROW - len(x)))) for x in (g, u, p)]
        assert stats[row].tolist() == [*map(float, squares), float(np.abs(u).max()), float((g == 0).sum())]
        assert stats[row, 4] >= {0: 65, 1: 64}.get(row, 0)


@every_backend
def test_the_order_of_a_sum_is_told_by_its_bits(name: str) -> None:
    """Of a hundred rows few have the same sum in another order."""
    g = torch.randn(100, ROW, generator=torch.Generator().manual_seed(3))
    want = [float(in_order(row)) for row in (g * g).numpy()]
    others = ((g * g).roll(16, dims=1), (g * g).view(100, 16, 8).transpose(1, 2).reshape(100, ROW))
    assert all(sum(float(in_order(x)) == y for x, y in zip(of.numpy(), want, strict=True)) < 90 for of in others)
    stats, rows = torch.empty(100, 5), torch.zeros(100, dtype=torch.int32)
    lists = ("sgd_plain", [g.view(-1)], [torch.zeros(100 * ROW)], [], [], [rows], torch.ones(1, 12))
    with backend(name):
        zero_kernels.foreach_step(*lists, row_stats=[stats])
    assert stats[:, 0].tolist() == want


@every_backend
def test_a_nan_stays_and_a_skipped_step_has_zeros(name: str) -> None:
    table = torch.tensor([[1.0] + [0.0] * 8 + [1.0, 1.0, 0.0]])  # lr 1
    grad = torch.tensor([1.0, math.inf, math.nan, 0.0] * (ROW // 4))
    for found, hyper in ((0.0, table), (1.0, table), (math.nan, table), (0.0, table[:0])):
        stats, rows = torch.full((1, 5), 7.0), torch.full((1,), len(hyper) - 1, dtype=torch.int32)
        with backend(name):
            zero_kernels.foreach_step(
                *("sgd_plain", [grad], [torch.zeros(ROW)], [], [], [rows], hyper),
                found_inf=torch.tensor([found]),
                row_stats=[stats],
            )
        if found == 0 and len(hyper):
            assert stats[0, :4].isnan().all() and stats[0, 4] == ROW / 4
        else:
            assert not stats.any()


@every_backend
def test_what_a_tail_lacks_is_0_and_not_0_times_inf(name: str) -> None:
    """A loss scale may overflow: the elements that there are say so, and no other."""
    stats, grad = torch.empty(2, 5), torch.full((ROW + 3,), 2.0)
    rows, table = torch.zeros(2, dtype=torch.int32), torch.tensor([[1.0] + [0.0] * 8 + [1.0, 1.0, 0.0]])
    with backend(name):
        zero_kernels.foreach_step(
            *("sgd_plain", [grad], [torch.zeros(ROW + 3)], [], [], [rows], table),
            grad_scale=torch.tensor([math.inf]),
            row_stats=[stats],
        )
    assert stats[:, :4].tolist() == [[math.inf] * 4] * 2
    assert stats[:, 4].tolist() == [0.0, 0.0]


def halved(g: Tensor, p: Tensor, states: Sequence[Tensor], c: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
    return p - c["rate"] * g, [state + 1 for state in states]


def test_a_rule_of_anybody_is_measured_too() -> None:
    """Its master may be of 16 bits: the update is what the master has moved by, after it was rounded."""
    grad, master, counts = torch.full((ROW + 3,), 2.0), torch.ones(ROW + 3, dtype=torch.bfloat16), torch.zeros(2)
    hyper = torch.zeros(1, 12)
    hyper[0, 0], hyper[0, 9:11] = 0.3, 1.0
    stats, rows = torch.empty(2, 5), torch.zeros(2, dtype=torch.int32)
    grad[ROW] = 0.0
    update_rows(halved, columns_of("rate"), [grad], [master], [counts], [], [rows], hyper, row_stats=[stats])
    p = float(torch.tensor(1 - 0.3 * 2).bfloat16())
    u = float(torch.tensor(p) - 1)
    torch.testing.assert_close(stats[0], torch.tensor([4.0 * ROW, ROW * u * u, ROW * p * p, -u, 0.0]))
    torch.testing.assert_close(stats[1], torch.tensor([8.0, 2 * u * u, 2 * p * p + 1, -u, 1.0]))
    assert counts.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("row_stats", "error", "message"),
    [
        ([torch.zeros(1, 5)], ValueError, "row_stats must have one tensor a shard: 2 grads, 1 row_stats"),
        (
            [torch.zeros(1, 5), torch.zeros(1, 4)],
            ValueError,
            r"shard 1: row_stats must have shape \[1, 5\], got \[1, 4",
        ),
        ([torch.zeros(1, 5), torch.zeros(1, 5).double()], TypeError, "shard 1: row_stats must be float32, got float64"),
        ([torch.zeros(5, 1).T, torch.zeros(1, 5)], None, ""),  # contiguous all the same
    ],
)
def test_wrong_row_stats_are_named(row_stats: list[Tensor], error: type[Exception] | None, message: str) -> None:
    tensors = [torch.zeros(ROW) for _ in range(4)]
    slots = [torch.zeros(1, dtype=torch.int32)] * 2
    lists = (tensors[:2], tensors[2:], [], [], slots, rule_table(RULES["sgd_plain"]))
    if error is None:
        zero_kernels.foreach_step("sgd_plain", *lists, row_stats=row_stats)
        assert row_stats[0][0, 4] == ROW
        return
    with pytest.raises(error, match=message):
        zero_kernels.foreach_step("sgd_plain", *lists, row_stats=row_stats)
