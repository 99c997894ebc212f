"""Programs of checkpoints as a family: one job saves, and another one loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from programs.family import Entries, Family, See
from programs.shrink import put, simpler

from checkpoint_programs import jobs, law
from checkpoint_programs.program import Job, Program, without

Half = tuple[str, Program]  # of a program: the job that saves, or the one that loads


class Checkpoints(Family):
    name = "checkpoint_programs"
    seconds = 3.0

    def jobs(self, program: Program) -> Sequence[Half]:
        return ("save", program), ("load", program)

    def world(self, half: Half) -> int:
        verb, program = half
        return program.saving if verb == "save" else program.loading

    def run(self, half: Half, rank: int, folder: str, see: See) -> None:
        verb, program = half
        (jobs.save if verb == "save" else jobs.load)(program, rank, folder, see)

    def verdict(self, program: Program, seen: Sequence[Entries]) -> str | None:
        return next(law.wrong(program, seen), None)

    def kind(self, outcome: str, message: str) -> str:
        """Which sentence of the law does not hold."""
        return message.partition(":")[0] if outcome == "differs" else outcome

    def why_not(self, program: Program) -> str | None:
        return law.why_not(program)

    def smaller(self, program: Program) -> Iterator[Program]:
        """What is left out of the source is left out of the target as well, as far as the target has it."""
        if program.target != program.source:
            yield replace(program, target=program.source)
        for ranks in (1, 2):
            if ranks < max(program.saving, program.loading):
                yield replace(program, saving=ranks, loading=ranks)
            if ranks < program.loading:
                yield replace(program, loading=ranks)
        for number, plan in enumerate(program.source.plans):
            for weight in plan.removable():
                source, target = (_without(job, number, *weight) for job in (program.source, program.target))
                yield replace(program, source=source, target=target)
        for less in simpler(program.source):
            yield replace(program, source=less, target=less)
        yield from simpler(program)


def _without(job: Job, number: int, part: int, weight: str) -> Job:
    return replace(job, plans=put(job.plans, number, without(job.plans[number], part, weight)))


CHECKPOINTS = Checkpoints()
