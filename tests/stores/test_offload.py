"""What ``state_offload`` and its arguments mean, and what they take: integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import zero_optim
from training_cases import make_parameters
from zero_optim.stores.offload import Footprint, Offload, Tier, footprint, read_nbytes, read_offload


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((None,), Offload()),
        (("paged",), Offload(Tier.PAGED, None)),
        (("paged", "auto"), Offload(Tier.PAGED, None)),
        (("paged", 0), Offload(Tier.PAGED, 0)),
        (("paged", "8GB"), Offload(Tier.PAGED, 8 * 10**9)),
        (("paged", "1.5MiB"), Offload(Tier.PAGED, 3 * 2**19)),
        (("cpu",), Offload(Tier.CPU)),
        (("nvme:/mnt/disk",), Offload(Tier.NVME, folder=Path("/mnt/disk"))),
        (("nvme:disk",), Offload(Tier.NVME, folder=Path.cwd() / "disk")),
    ],
)
def test_a_choice_is_read(arguments: tuple[Any, ...], expected: Offload) -> None:
    assert read_offload(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpu",), ("state_offload", "'paged', 'cpu' or 'nvme:DIR'", "'gpu'")),
        (("nvme:",), ("state_offload", "'nvme:'")),
        ((True,), ("state_offload", "True")),
        (("paged", -1), ("device_budget", "-1")),
        (("paged", True), ("device_budget", "True")),
        (("paged", "8 apples"), ("device_budget", "8 apples")),
        (("paged", 1.5), ("device_budget", "1.5")),
        (("cpu", "8GB"), ("device_budget", "'paged'", "'cpu'")),
        ((None, 0), ("device_budget", "'paged'", "None")),
    ],
)
def test_a_wrong_choice_names_the_argument(arguments: tuple[Any, ...], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        read_offload(*arguments)
    for word in words:
        assert word in str(caught.value)


def test_the_optimizer_refuses_a_wrong_choice() -> None:
    with pytest.raises(ValueError, match="state_offload"):
        zero_optim.ShardedAdamW(make_parameters(), state_offload="disk")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10B", 10),
        ("2kB", 2000),
        ("2KiB", 2048),
        ("0.5GB", 5 * 10**8),
        ("1 TB", 10**12),
        ("3M", 3 * 10**6),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert read_nbytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1XB", "1iB", "nan"])
def test_no_sizes(text: str) -> None:
    assert read_nbytes(text) is None


PAGES = [600, 1200, 300]


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        (Offload(), Footprint(2100, 0, 0)),
        (Offload(Tier.PAGED, 0), Footprint(2400, 2100, 0)),
        (Offload(Tier.PAGED, 900), Footprint(900 + 2400, 1200, 0)),
        (Offload(Tier.PAGED, 5000), Footprint(2100, 0, 0)),
        (Offload(Tier.PAGED, None), Footprint(600 + 300 + 2400, 1200, 0)),
        (Offload(Tier.CPU), Footprint(0, 2107, 0)),
        (Offload(Tier.NVME, folder=Path("/")), Footprint(2400, 7200, 2100)),
    ],
)
def test_what_a_store_takes(offload: Offload, expected: Footprint) -> None:
    assert footprint(offload, PAGES, mirrors=7, room=1000) == expected
