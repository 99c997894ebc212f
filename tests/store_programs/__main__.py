"""``python -m store_programs --seconds 600``: random programs until the time is over; ``--program FILE``: one again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator

from programs.search import Named, parser, search

from store_programs.generate import generate
from store_programs.law import Stores


def drawn(seed: int, worlds: list[int]) -> Iterator[Named]:
    """From this seed on."""
    for number in itertools.count(seed):
        world = worlds[number % len(worlds)]
        yield f"seed {number} world {world}", generate(number, world)


def main() -> None:
    options_of = parser("store_programs", __doc__)
    options_of.add_argument("--world", type=int, action="append")
    options = options_of.parse_args()
    search(Stores(), drawn(options.seed, options.world or [2, 1, 2, 3]), options, json.loads)


if __name__ == "__main__":
    main()
