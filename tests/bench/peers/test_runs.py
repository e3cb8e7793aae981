"""Alternation with real workers, and the file that an interrupted comparison goes on from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import make_run
from .processes import BenchError, Worker
from .runs import Alternation, Question, Record, Run, turns
from .sides import SPECRUN, Mode

QUESTIONS = [Question("a", "text a", [1, 2]), Question("b", "text b", [10])]
OWN = Mode(SPECRUN, "plain", 0, "specrun plain", "specrun plain")


def peer(method: str, side: str = "peer") -> Mode:
    return Mode(side, method, 2, f"{side} {method}", f"{side} plain")


def silent(text: str) -> None:
    return


def test_every_mode_runs_first_sometimes() -> None:
    modes = [OWN, peer("plain"), peer("lookup")]
    order = [(question.id, repeat, mode.label) for question, repeat, mode in turns(QUESTIONS, 3, modes)]
    assert len(set(order)) == len(order) == 2 * 3 * 3
    firsts = Counter(label for _, _, label in order[::3])
    assert firsts == {mode.label: 2 for mode in modes}


def test_seconds_per_token_leaves_out_the_tokens_of_the_start() -> None:
    assert Run("a", "m", 0, 3, 0.5, [1] * 8).seconds_per_token == 0.1


def test_runs_of_all_modes(scripted: Callable[..., Worker]) -> None:
    workers = {SPECRUN: scripted(SPECRUN), "peer": scripted("peer")}
    record = Record(None, {})
    alternation = Alternation(workers, [OWN, peer("plain"), peer("lookup")], record)
    alternation.run(QUESTIONS, 2, 3, silent)
    assert alternation.failures == {}
    assert len(record.runs) == 2 * 2 * 3
    assert {tuple(run.token_ids) for run in record.runs if run.prompt == "a"} == {(3, 4, 5)}
    for run in record.runs:
        (waiting,) = run.idle
        assert waiting == ("peer" if run.mode == OWN.label else SPECRUN)
        waited, used = run.idle[waiting]
        assert waited > 0
        assert used >= 0


def test_a_mode_that_fails_is_left_out(scripted: Callable[..., Worker]) -> None:
    workers = {SPECRUN: scripted(SPECRUN), "peer": scripted("peer")}
    record = Record(None, {})
    alternation = Alternation(workers, [OWN, peer("plain"), peer("refuse"), peer("mute")], record)
    alternation.run(QUESTIONS, 1, 3, silent)
    assert alternation.failures == {
        "peer refuse": "peer: no such method here",
        "peer mute": "it wrote only 1 tokens for prompt a",
    }
    assert Counter(run.mode for run in record.runs) == {"specrun plain": 2, "peer plain": 2}


@pytest.mark.parametrize("survives", [0, 6])
def test_a_side_that_ends_loses_all_its_modes(scripted: Callable[..., Worker], survives: int) -> None:
    workers = {SPECRUN: scripted(SPECRUN), "peer": scripted("peer", survives), "other": scripted("other")}
    modes = [OWN, peer("plain"), peer("exit"), peer("plain", "other")]
    record = Record(None, {})
    alternation = Alternation(workers, modes, record)
    alternation.run(QUESTIONS, 2, 3, silent)
    assert set(alternation.failures) == {"peer plain", "peer exit"}
    assert "it broke" in alternation.failures["peer plain"]
    counts = Counter(run.mode for run in record.runs)
    assert counts["specrun plain"] == counts["other plain"] == 4


def test_a_side_that_ends_while_it_waits(scripted: Callable[..., Worker]) -> None:
    workers = {SPECRUN: scripted(SPECRUN), "peer": scripted("peer")}
    with pytest.raises(BenchError):
        workers["peer"].ask("run", method="exit", prompt_ids=[1], max_tokens=1, draft_length=0)
    workers["peer"].alive = True  # nobody has noticed
    record = Record(None, {})
    alternation = Alternation(workers, [OWN, peer("plain")], record)
    alternation.run(QUESTIONS, 1, 3, silent)
    assert set(alternation.failures) == {"peer plain"}
    assert [run.mode for run in record.runs] == ["specrun plain", "specrun plain"]


def test_specrun_must_not_fail(scripted: Callable[..., Worker]) -> None:
    workers = {SPECRUN: scripted(SPECRUN), "peer": scripted("peer")}
    for method in ("refuse", "exit"):
        own = Mode(SPECRUN, method, 0, "specrun ngram", "specrun plain")
        with pytest.raises(BenchError, match="specrun"):
            Alternation(workers, [own, peer("plain")], Record(None, {})).run(QUESTIONS, 1, 3, silent)


def test_an_interrupted_comparison_goes_on(scripted: Callable[..., Worker], tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    settings = {"model": "m"}
    workers = {SPECRUN: scripted(SPECRUN), "peer": scripted("peer")}
    modes = [OWN, peer("plain")]
    first = Record(path, settings)
    first.add_fact("reference", "a", [1, 2])
    Alternation(workers, modes, first).run(QUESTIONS[:1], 2, 3, silent)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"prompt": "b", "mo')  # cut in the middle of a line
    second = Record(path, settings)
    assert second.runs == first.runs
    assert second.facts == {("reference", "a"): [1, 2]}
    Alternation(workers, modes, second).run(QUESTIONS, 2, 3, silent)
    assert second.runs[:4] == first.runs
    assert [run.prompt for run in second.runs[4:]] == ["b"] * 4
    assert Record(path, settings).runs == second.runs


def test_files_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    Record(path, {"model": "m"}).add_run(make_run("specrun plain", "a", 0, 5, [1, 2]))
    with pytest.raises(BenchError, match="other settings"):
        Record(path, {"model": "n"})
    path.write_text("something else\n", encoding="utf-8")
    with pytest.raises(BenchError, match="no file of this benchmark"):
        Record(path, {"model": "m"})
    with pytest.raises(BenchError, match="cannot be read or written"):
        Record(tmp_path / "missing" / "runs.jsonl", {})
