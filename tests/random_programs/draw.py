"""What every generator draws with: hypothesis chooses, and makes what fails short. The first choice is the simplest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

T = TypeVar("T")


class Draw:
    """``draw`` is that of ``hypothesis.strategies.composite``."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self.draw = draw

    def number(self, least: int, most: int) -> int:
        return self.draw(st.integers(least, most))

    def chance(self, percent: int) -> bool:
        """False is the simplest."""
        return percent > 0 and self.number(0, 99) >= 100 - percent

    def pick(self, options: Sequence[T]) -> T:
        return options[self.number(0, len(options) - 1)]

    def weighted(self, options: Sequence[tuple[int, T]]) -> T:
        at = self.number(0, sum(weight for weight, _ in options) - 1)
        for weight, option in options:
            if at < weight:
                return option
            at -= weight
        raise AssertionError

    def some(self, options: Sequence[T], percent: int = 50, least: int = 0) -> list[T]:
        """Each with that chance, in order; of at least so many. The fewest are the simplest."""
        found = [option for option in options if self.chance(percent)]
        missing = [option for option in options if option not in found]
        while len(found) < least and missing:
            found.append(missing.pop(self.number(0, len(missing) - 1)))
        return found

    def shuffled(self, options: Sequence[T]) -> list[T]:
        return list(self.draw(st.permutations(list(options))))


def programs(generator: Callable[..., T], *args: Any) -> st.SearchStrategy[T]:
    """What ``generator(draw, *args)`` makes of a ``Draw``, as a strategy."""

    @st.composite
    def made(draw: Any) -> T:
        return generator(Draw(draw), *args)

    return made()


AT_ONCE = 10
"""Of ten programs of a seed nine are distinct, of 40 some 25: hypothesis varies what it has drawn before."""


def check_drawn(drawn: st.SearchStrategy[T], check: Callable[[T], None], seed: int, count: int = AT_ONCE) -> None:
    """Call ``check`` on ``count`` programs, the same for the same seed. What it raises for the shortest is raised."""

    @hypothesis.seed(seed)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=[*HealthCheck],
        phases=[Phase.generate, Phase.shrink],
    )
    @given(drawn)
    def test(made: T) -> None:
        check(made)

    test()
