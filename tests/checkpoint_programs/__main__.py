"""``python -m checkpoint_programs --seconds 600 --seed 0``: random programs until the time is over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from programs.search import Named, parser, search

from checkpoint_programs import program as words
from checkpoint_programs.execute import CHECKPOINTS
from checkpoint_programs.generate import program

RANKS = ((1, 1), (2, 2), (3, 3), (2, 3), (4, 2), (1, 4))  # that save, and that load


def drawn(seed: int) -> Iterator[Named]:
    """From this seed on."""
    for number in itertools.count(seed):
        yield f"seed {number}", program(number, *RANKS[number % len(RANKS)])


def main() -> None:
    options = parser("checkpoint_programs", __doc__).parse_args()
    search(CHECKPOINTS, drawn(options.seed), options, lambda text: eval(text, vars(words)))


if __name__ == "__main__":
    main()
