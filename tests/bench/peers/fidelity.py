"""How near each side's numbers are to the fp32 weights: against the greedy text of specrun's fp32 bundle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .processes import BenchError, Worker
from .runs import Progress, Question, Record


def references(worker: Callable[[], Worker], questions: Sequence[Question], length: int, record: Record) -> None:
    """Record the fp32 text of every prompt as the fact ("reference", prompt).

    worker: starts the process of the fp32 bundle; called only if a text is missing.
    """
    missing = [question for question in questions if ("reference", question.id) not in record.facts]
    if not missing:
        return
    started = worker()
    try:
        for question in missing:
            request = {"method": "none", "prompt": question.prompt, "prompt_ids": question.ids, "draft_length": 0}
            text = started.ask("run", max_tokens=length, **request)["token_ids"]
            record.add_fact("reference", question.id, text)
    finally:
        started.close()


def measure_agreement(
    workers: Mapping[str, Worker],
    questions: Sequence[Question],
    positions: int,
    record: Record,
    progress: Progress,
) -> dict[str, str]:
    """Record, as ("agreement", side), at how many of the reference's positions a side's next token is the same.

    Each side sees the prompt and the reference's own tokens up to a position, at `positions` places of each text; so a
    text that went another way does not count twice. Returns why a side could not be asked, by its label.
    """
    failures = {}
    for side, worker in workers.items():
        if not worker.alive or ("agreement", side) in record.facts:
            continue
        progress(f"next tokens of {side}")
        try:
            record.add_fact("agreement", side, _agreement(worker, questions, positions, record))
        except BenchError as error:
            failures[side] = str(error)
    progress("")
    return failures


def _agreement(worker: Worker, questions: Sequence[Question], positions: int, record: Record) -> list[int]:
    equal = asked = 0
    for question in questions:
        reference: list[int] = record.facts["reference", question.id]
        for place in cuts(len(reference), positions):
            answer = worker.ask("next", prompt_ids=question.ids + reference[:place])
            equal += answer["token_id"] == reference[place]
            asked += 1
    return [equal, asked]


def cuts(length: int, positions: int) -> list[int]:
    """`positions` places, or all, spread evenly over `length` tokens from the first one on."""
    count = min(length, positions)
    return [number * length // count for number in range(count)]
