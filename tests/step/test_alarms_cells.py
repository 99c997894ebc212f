"""Every cell of the tables of ``Combine`` and ``Exchanged``; and an alarm on its way through the exchange."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tables import table
from torch import Tensor
from zero_optim.comm.sharding import Sharding
from zero_optim.errors import GradientError, OffloadError, RankMismatchError, ZeroOptimError
from zero_optim.step import exchange
from zero_optim.step.alarms import HASH_BITS, UNEQUAL, Alarm, AlarmColumns, Combine, alarms

TABLE = table(Combine.__doc__, "combine")
EXCHANGED = table(exchange.Exchanged.__doc__, "event")
CODES = 4


def situation(numbers: Sequence[int]) -> str:
    """Which column of the table these numbers of the ranks belong to."""
    if 0 in numbers:
        return "some 0" if any(numbers) else "all 0"
    return "equal" if len(set(numbers)) == 1 else "unequal"


def over_ranks(vectors: Sequence[Tensor]) -> Tensor:
    """What the exchange makes of the ranks' vectors."""
    return torch.stack(list(vectors)).sum(0)


def invented(combine: Combine, name: str = "invented") -> Alarm:
    return Alarm(name, combine, GradientError, f"{{names}} is {name}", CODES)


def width(of: Sequence[Alarm]) -> int:
    return sum(alarm.columns for alarm in of)


def first_raised(of: Sequence[Alarm], columns: Tensor) -> Alarm | None:
    """What the host raises by these columns."""
    read = AlarmColumns(of, columns)
    read.on_host.send()
    return read.read_first_raised()


def filled(of: Sequence[Alarm], counts: Mapping[str, int]) -> Tensor:
    """One rank's vector. What was there before must not matter."""
    columns = torch.full((width(of),), 7.0)
    AlarmColumns(of, columns).fill(counts)
    return columns


def test_the_table_has_every_rule_and_every_situation():
    assert {rule for rule, _ in TABLE} == {rule.name for rule in Combine}
    situations = {situation(numbers) for numbers in itertools.product(range(CODES), repeat=2)}
    assert {column for _, column in TABLE} == {"columns", *situations}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("rule", "column", "cell"), [(*cell, text) for cell, text in TABLE.items() if cell[1] != "columns"]
)
def test_a_cell(rule: str, column: str, cell: str, ranks: int):
    """On the host and on the device, for all numbers of the ranks that belong to the column."""
    alarm = invented(Combine[rule])
    every = [numbers for numbers in itertools.product(range(CODES), repeat=ranks) if situation(numbers) == column]
    assert every
    for numbers in every:
        columns = over_ranks([torch.tensor(alarm.entry(number)) for number in numbers])
        assert first_raised([alarm], columns) is (alarm if cell == "raised" else None), numbers
        on_device = AlarmColumns([alarm], columns).raised_on_device()
        assert on_device.shape == (1,) and on_device.dtype == torch.float32
        assert bool(on_device > 0) is (cell == "raised"), numbers


@pytest.mark.parametrize("rule", Combine)
def test_the_width_of_an_alarm(rule: Combine):
    alarm = invented(rule)
    assert alarm.columns == {"1": 1, "2": 2, "codes": CODES}[TABLE[rule.name, "columns"]]
    assert all(len(alarm.entry(number)) == alarm.columns for number in range(CODES))


LISTS = [(*alarms(by_units=False), UNEQUAL), alarms(by_units=True)]
PLACES = [(of, place) for of in LISTS for place in range(len(of) + 1)]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("rule", Combine)
@pytest.mark.parametrize(("of", "place"), PLACES)
def test_a_new_alarm_is_one_entry_of_the_list(of: tuple[Alarm, ...], place: int, rule: Combine, ranks: int):
    """Wherever it stands in the list: width, quiet vector and ``fill`` follow from the list."""
    new = invented(rule)
    longer = (*of[:place], new, *of[place:])
    assert width(longer) == width(of) + new.columns
    start = width(of[:place])
    quiet = filled(longer, {})
    assert quiet.tolist() == [value for alarm in longer for value in alarm.entry(0)]
    for numbers in itertools.product(range(CODES), repeat=ranks):
        vectors = [filled(longer, {"invented": number}) for number in numbers]
        for number, vector in zip(numbers, vectors, strict=True):
            assert vector[start : start + new.columns].tolist() == new.entry(number)
            vector[start : start + new.columns] = quiet[start : start + new.columns]
            assert torch.equal(vector, quiet), "the columns of other alarms stay as they are"
            vector[start : start + new.columns] = torch.tensor(new.entry(number))
        together = over_ranks(vectors)
        raises = TABLE[rule.name, situation(numbers)] == "raised"
        assert first_raised(longer, together) is (new if raises else None)
        assert bool(AlarmColumns(longer, together).raised_on_device() > 0) is raises


@pytest.mark.parametrize("of", LISTS)
def test_of_several_alarms_the_first_in_the_list_is_raised(of: tuple[Alarm, ...]):
    """Rank 0 has two alarms, rank 1 none: whatever their rules, that raises both."""
    for earlier, later in itertools.combinations(of, 2):
        vectors = [filled(of, {later.name: 1, earlier.name: 1}), filled(of, {})]
        assert first_raised(of, over_ranks(vectors)) is earlier


MISMATCHES = ("parted", "thawed", "edited", "counting", "options", "unequal")
ABOUT_NO_PARAMETER = {"parted": "units", "uncounted": "count", "counting": "count", "options": "options"}
ABOUT_NO_PARAMETER["unequal"] = "check_replicas"


@pytest.mark.parametrize("of", LISTS)
def test_what_each_alarm_raises_has_a_type_and_names_what_it_is_about(of: tuple[Alarm, ...]):
    assert len({alarm.name for alarm in of}) == len(of)
    for alarm in of:
        error = alarm.error("weight", "torch.float32", ())
        kinds = {"offload": OffloadError, **dict.fromkeys(MISMATCHES, RankMismatchError)}
        assert isinstance(error, kinds.get(alarm.name, GradientError))
        assert ABOUT_NO_PARAMETER.get(alarm.name, "weight") in str(error)
    refused = next(alarm for alarm in of if alarm.name == "refused")
    assert str(refused.error("weight", "torch.float32", ["mine", "too"])) == "mine; too"


def test_numbers_that_do_not_cancel_raise_whatever_their_sign():
    for columns in (torch.ones(HASH_BITS), -torch.ones(HASH_BITS)):
        assert first_raised([UNEQUAL], columns) is UNEQUAL
        assert bool(AlarmColumns([UNEQUAL], columns).raised_on_device() > 0)


def test_without_alarms_nothing_is_raised():
    columns = AlarmColumns((), torch.zeros(0))
    columns.fill({"late": 1})
    assert first_raised((), torch.zeros(0)) is None and float(columns.raised_on_device()) == 0


# -- through the exchange ----------------------------------------------------------------------------------------------


@dataclass
class FakeComm:
    """One of several ranks that live one after another. The last one to exchange gives what all ranks would get."""

    rank: int
    world_size: int
    sent: list[Tensor] = field(default_factory=list)  # shared

    def exchange(self, vector: Tensor) -> None:
        self.sent.append(vector.clone())
        vector.copy_(over_ranks(self.sent))


@pytest.mark.parametrize("norm_type", [2.0, None])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("by_units", [False, True])
@pytest.mark.parametrize("rule", [Combine.ANY, Combine.DIVIDED])
@pytest.mark.parametrize("column", ["all 0", "some 0", "equal", "unequal"])
def test_the_exchange_carries_a_new_alarm(
    monkeypatch: pytest.MonkeyPatch, column: str, rule: Combine, by_units: bool, ranks: int, norm_type: float | None
):
    """It needs the entry and the set of parameters alone. The message names the parameters."""
    original: Callable[..., tuple[Alarm, ...]] = exchange.alarms
    monkeypatch.setattr(exchange, "alarms", lambda **options: (*original(**options), invented(rule)))
    labels, device = ["weight", "bias", "scale"], torch.device("cpu")
    every = [numbers for numbers in itertools.product(range(3), repeat=ranks) if situation(numbers) == column]
    for numbers in every:
        sent: list[Tensor] = []
        raised: list[ZeroOptimError | None] = []
        for rank, number in enumerate(numbers):
            comm: Any = FakeComm(rank, ranks, sent)
            carries = exchange.Exchange(Sharding(comm, 2, None, device), labels, {}, by_units=by_units)
            about = {"invented": {*range(1, 1 + number)}}
            flags = torch.zeros(3, dtype=torch.int32), torch.arange(3)
            try:
                carries.run(exchange.ToExchange([], bytearray(3), norm_type, True, about, {}, {}, flags))
                raised.append(None)
            except ZeroOptimError as error:
                raised.append(error)
            carries.decide(True)
        error = raised[-1]  # the last rank has what all ranks get
        assert bool(carries.found_inf > 0) is (error is not None), "the step is skipped where it raises"
        assert (error is not None) is (TABLE[rule.name, column] == "raised"), numbers
        if error is not None:
            named = ", ".join(labels[index] for index in range(1, 1 + max(numbers)))
            assert isinstance(error, GradientError) and str(error) == f"{named} is invented"


@pytest.mark.parametrize(("event", "before", "after"), [(*cell, after) for cell, after in EXCHANGED.items()])
def test_what_is_known_of_the_gradients(event: str, before: str, after: str):
    comm: Any = FakeComm(0, 2)
    carries = exchange.Exchange(Sharding(comm, 2, None, torch.device("cpu")), ["a", "b"], {}, by_units=False)

    def run(*, stats: bool, late: Set[int] = frozenset()) -> None:
        flags = torch.zeros(2, dtype=torch.int32), torch.arange(2)
        carries.run(exchange.ToExchange([], bytearray(2), None, stats, {"late": late}, {}, {}, flags))

    assert {state for _, state in EXCHANGED} == {state.name for state in exchange.Exchanged}
    if before != "OUTDATED":
        run(stats=before == "COUNTED")
    assert carries.state is exchange.Exchanged[before]
    if event == "run: raises":
        with pytest.raises(GradientError, match="of b arrived"):
            run(stats=True, late={1})
    elif event.startswith("run"):
        run(stats=event == "run: stats")
    elif event == "follow_edits":
        carries.follow_edits({0}, {1})
        assert not carries.used[0]
    else:
        getattr(carries, event)()
    assert carries.state is exchange.Exchanged[after]
    assert carries.knows(stats=False) is (after != "OUTDATED")
    assert carries.knows(stats=True) is (after == "COUNTED")


MANY = 16_384


def added_up(usual: Tensor, other: Tensor, order: str) -> Tensor:
    """Of ``MANY`` ranks' vectors in fp32, of which one is ``other``: an all-reduce may take any order."""
    if order == "tree":
        level = [other, *[usual] * (MANY - 1)]
        while len(level) > 1:
            level = [first + second for first, second in zip(level[::2], level[1::2], strict=True)]
        return level[0]
    total = other if order == "other first" else torch.zeros_like(usual)
    for _ in range(MANY - 1):
        total = total + usual
    return total if order == "other first" else total + other


@dataclass
class OneOfMany:
    """Rank 5 of ``MANY``, of which all others have sent ``usual``; None: it is such a one itself, and nothing comes."""

    usual: Tensor | None
    order: str
    rank: int = 5
    world_size: int = MANY

    def exchange(self, vector: Tensor) -> None:
        own = 2 * MANY  # entries that only one rank writes
        self.sent = vector[:-own].clone()
        if self.usual is not None:
            vector[:-own] = added_up(self.usual, self.sent, self.order)


def exchanged(comm: Any, used: bytes, about: Mapping[str, set[int]]) -> exchange.Exchange:
    carries = exchange.Exchange(Sharding(comm, 2, None, torch.device("cpu")), ["a", "b", "c"], {}, by_units=False)
    flags = torch.zeros(3, dtype=torch.int32), torch.arange(3)
    carries.run(exchange.ToExchange([], bytearray(used), 2.0, True, about, {}, {}, flags))
    return carries


@pytest.mark.parametrize("order", ["other first", "other last", "tree"])
def test_what_many_ranks_use_and_name_is_exact(order: str) -> None:
    """An alarm that all ranks have is quiet, and the step goes on by who uses what: parameter 0 is used by one rank."""
    world = {"thawed": {0, 1, 2}}
    usual = OneOfMany(None, order)
    exchanged(usual, b"\0\1\0", world)
    carries = exchanged(OneOfMany(usual.sent, order), b"\1\1\0", world)
    assert carries.used.tolist() == [True, True, False]
    usual = OneOfMany(None, order)
    exchanged(usual, b"\1\1\1", {})
    with pytest.raises(GradientError, match="a gradient of b arrived"):
        exchanged(OneOfMany(usual.sent, order), b"\1\0\1", {"late": {1}})
