"""The tables of a run: memory against plan, traffic, time, every start, every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..drawing.figures import NONE, count, duration, megabytes, percent, short
from ..train.report import NOT_OF_STEPS, phase_milliseconds, state_kinds
from ..train.session import Session
from .html import Child, Html, details, join, table, tag
from .run_charts import phases
from .run_data import Run, fullest, ranks_of, state_bytes

MOST_ROWS = 1000
_MOST_RANKS = 8
_NAMES = {"unsharded": "unsharded, at most"}


def memory(session: Session) -> Html:
    """Compare the rank with most model state with the plan; below it show all ranks."""
    rank = fullest(session)
    held, planned = ranks_of(session)[rank].memory, session.forecast.memory
    rows = [_against_plan(kind, held.get(kind, 0.0), planned.get(kind)) for kind in state_kinds(held)]
    total = _against_plan("model state", state_bytes(held), state_bytes(planned))
    rows.append([tag("strong", cell) for cell in total])
    others = (kind for kind in held if kind not in state_kinds(held))
    rows += [_against_plan(kind, held[kind], planned.get(kind)) for kind in others]
    headings = ("", "measured, MB", "plan, MB", "difference")
    caption = f"Memory of rank {rank}, which holds most; the plan is made of the parameters' shapes alone"
    return join([table(headings, rows, caption), _memory_of_ranks(session)])


def _against_plan(kind: str, measured: float, planned: float | None) -> list[Child]:
    """Make a row: name, measured, planned, and by how much the measured is above the planned."""
    name = _NAMES.get(kind, kind)
    if not planned:
        return [name, megabytes(measured), NONE if planned is None else megabytes(planned), NONE]
    return [name, megabytes(measured), megabytes(planned), percent(measured / planned - 1)]


def _memory_of_ranks(session: Session) -> Html:
    ranks = ranks_of(session)
    shown = range(min(len(ranks), _MOST_RANKS))
    kinds = list(ranks[0].memory)
    rows = [[_NAMES.get(kind, kind), *(megabytes(ranks[rank].memory.get(kind, 0)) for rank in shown)] for kind in kinds]
    rows.append([f"peak: {session.peak_of}", *(megabytes(ranks[rank].peak_bytes) for rank in shown)])
    left = f", the first {_MOST_RANKS} of {len(ranks)}" if len(ranks) > _MOST_RANKS else ""
    whole = table(["", *(f"rank {rank}" for rank in shown)], rows, f"Memory of each rank, MB{left}")
    return details(f"Every rank{left}", whole)


def traffic(session: Session) -> Html:
    """Communication of rank 0, by collective. Bytes are of whole tensors."""
    report = ranks_of(session)[0]
    if not report.collectives:
        return tag("p", "None: there was one rank.", class_="note")
    planned = session.forecast.traffic
    moved = sorted(report.collectives.items())
    rows = [_traffic_row(kind, of_kind, planned.get(kind), report.steps) for kind, of_kind in moved]
    headings = ("", "MB a step", "plan, MB", "difference", "calls", "blocked, s")
    note = "Bytes are of whole tensors: of them a rank puts (N-1)/N on the wire, and twice that of an all-reduce. "
    note += "Both count the padding of buckets. Blocked: the host waited for that long."
    caption = f"Communication of rank 0 in {count(report.steps, 'step')}"
    return join([table(headings, rows, caption), tag("p", note, class_="note")])


def _traffic_row(kind: str, moved: dict[str, float], planned: float | None, steps: int) -> list[Child]:
    once = kind in NOT_OF_STEPS
    name, measured, *plan = _against_plan(kind, moved["bytes"] / (1 if once else steps), planned)
    calls, blocked = f"{moved['calls']:,.0f}", f"{moved['wait_seconds']:.2f}"
    return [name, f"{measured} once" if once else measured, *plan, calls, blocked]


def time_of_ranks(session: Session) -> Html:
    """Mean milliseconds a step, of each rank."""
    on_gpu = session.config["device"] == "cuda"
    columns = [phase_milliseconds(report, on_gpu) for report in ranks_of(session)[:_MOST_RANKS]]
    rows = [[phase, *(f"{column[phase]:.1f}" for column in columns)] for phase in columns[0]]
    where = "forward, backward and step" if session.config["stage"] >= 3 else "backward and step"
    note = f"Exposed communication is host time blocked on collectives, and is inside {where}."
    if on_gpu:
        note = f"Between events of the compute stream. Waits for communication are inside {where}, and not known apart."
    headings = ["", *(f"rank {rank}" for rank in range(len(columns)))]
    return join([table(headings, rows, "Mean time of a step's phases, ms"), tag("p", note, class_="note")])


def sessions(run: Run) -> Html:
    """Every start of the run."""
    rows = [list(_session_row(session)) for session in run.sessions]
    headings = ("started", "from step", "to step", "end", "duration", "held-out loss", "skipped steps")
    return table(headings, rows, "Every start of zero-optim train in this folder")


def _session_row(session: Session) -> Iterator[str]:
    ending = session.ending
    back = session.taken_back_to
    yield session.started[:19].replace("T", " ")
    yield f"{session.after_step + 1:,}"
    yield (f"{ending.step:,}" if ending else NONE) + (f", taken back to {back:,}" if back is not None else "")
    yield ending.outcome.value if ending else "not on record"
    yield duration(ending.seconds) if ending else NONE
    yield short(ending.validation_loss, 5) if ending else NONE
    yield f"{ending.ranks[0].skipped_steps:,}" if ending and ending.ranks else NONE


def steps(run: Run) -> Html:
    """Show the log's lines; of more than ``MOST_ROWS``, evenly spaced ones and all steps that were skipped or lost."""
    stride = -(-len(run.steps) // MOST_ROWS)
    notable = {*run.skipped[:MOST_ROWS], *run.lost[:MOST_ROWS]}
    shown = [s for n, s in enumerate(run.steps) if n % stride == 0 or s.step in notable or n == len(run.steps) - 1]
    named = phases(run)[:-1] if any(step.ms for step in run.steps) else []
    figures = ("step", "loss", "gradient norm", "learning rate", "loss scale", "tokens/s")
    headings = (*figures, *(f"{name}, ms" for name in named))
    rows = [
        [
            f"{step.step:,}",
            "not finite" if step.loss is None else f"{step.loss:.4f}",
            "not finite: skipped" if step.grad_norm is None else short(step.grad_norm),
            short(step.lr),
            f"{step.loss_scale:,g}",
            f"{step.tokens_per_s:,.0f}",
            *(f"{(step.ms or {}).get(name, 0.0):.1f}" for name in named),
        ]
        for step in shown
    ]
    some = f", every {stride}th and all that were skipped; log.jsonl has all" if stride > 1 else ""
    caption = f"The log: {count(len(run.steps), 'step')}{some}"
    return details(f"Steps as a table ({len(shown):,} rows)", table(headings, rows, caption))


def facts(pairs: Sequence[tuple[str, str | Html]]) -> Html:
    """Make a list of names and facts."""
    return tag("dl", *(join([tag("dt", name), tag("dd", fact)]) for name, fact in pairs), class_="facts card")


def outcome_name(session: Session | None) -> str:
    ending = session.ending if session else None
    return ending.outcome.value if ending else "running, or killed"
