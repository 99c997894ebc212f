"""``python -m fuzz --seconds 600 --seed 0``: random programs until the time is over."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from programs.search import Named, parser, search

from fuzz import law, oracle
from fuzz import program as words
from fuzz.execute import FACE
from fuzz.generate import FLAVOURS, program


def drawn(seed: int, flavours: list[str]) -> Iterator[Named]:
    for number in itertools.count(seed * 1_000_000):
        flavour = flavours[number % len(flavours)]
        yield f"{flavour} {number}", program(number, FLAVOURS[flavour])


def main() -> None:
    options_of = parser("fuzz", __doc__)
    options_of.add_argument(
        "--flavour", choices=FLAVOURS, action="append", help="several times for several; else all but straight"
    )
    options_of.add_argument("--no-kinds", action="store_true", help="do not check what .grad is")
    options_of.add_argument("--narrow", action="append", default=[], help="a switch of fuzz.law to turn off")
    options = options_of.parse_args()
    oracle.KINDS = not options.no_kinds
    for switch in options.narrow:
        if not getattr(law, switch):
            options_of.error(f"{switch} is off")
        setattr(law, switch, False)
    flavours = options.flavour or [name for name in FLAVOURS if name != "straight"]
    search(FACE, drawn(options.seed, flavours), options, lambda text: eval(text, vars(words)))


if __name__ == "__main__":
    main()
