"""``python -m part_programs --seconds 600 --seed 0``: random programs until the time is over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from programs.search import Named, parser, search

from part_programs import generate
from part_programs.execute import PARTS


def drawn(seed: int) -> Iterator[Named]:
    """From this seed on."""
    for number in itertools.count(seed):
        made = generate.program(number)
        if PARTS.why_not(made) is None:
            yield f"seed {number}", made


def main() -> None:
    options = parser("part_programs", __doc__).parse_args()
    search(PARTS, drawn(options.seed), options, lambda text: eval(text, vars(generate)))


if __name__ == "__main__":
    main()
