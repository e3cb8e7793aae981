"""Rows and ratios from runs whose speeds are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from .conftest import make_run
from .fidelity import cuts
from .runs import Record
from .sides import Mode, specrun_modes
from .table import Row, fastest_peer, format_table, idle_loads, rows

PEER = [
    Mode("genai", "plain", 0, "genai plain", "genai plain"),
    Mode("genai", "ngram", 2, "genai ngram 2", "genai plain"),
]
MODES = [*specrun_modes(["ngram"]), *PEER]
TEXT = [5, 6, 7, 8]


def record(speeds: Mapping[str, Sequence[Sequence[float]]]) -> Record:
    """Milliseconds a token by mode: a list for each prompt, with a figure for each repeat."""
    made = Record(None, {})
    for mode, prompts in speeds.items():
        for prompt, repeats in enumerate(prompts):
            for repeat, value in enumerate(repeats):
                made.add_run(make_run(mode, str(prompt), repeat, value, TEXT))
    return made


def by_mode(made: Record) -> dict[str, Row]:
    return {row.mode: row for row in rows(MODES, made)}


def test_ratios_are_paired_by_prompt_and_repeat() -> None:
    # The machine is half as fast in the second repeat of the first prompt: no ratio shows it.
    speeds = {
        "specrun baseline": [[4, 8], [10, 10]],
        "specrun plain": [[5, 10], [10, 10]],
        "specrun ngram": [[2, 4], [8, 8]],
        "genai plain": [[4, 8], [20, 20]],
        "genai ngram 2": [[2, 4], [10, 10]],
    }
    table = by_mode(record(speeds))
    assert table["specrun plain"].to_baseline == pytest.approx((4 / 5 + 1) / 2)
    assert table["specrun ngram"].to_own_plain == pytest.approx((5 / 2 + 10 / 8) / 2)
    assert table["genai ngram 2"].to_own_plain == pytest.approx(2)
    assert table["genai ngram 2"].to_baseline == pytest.approx((2 + 1) / 2)
    assert table["genai plain"].specrun == pytest.approx({"plain": (4 / 5 + 2) / 2, "ngram": (2 + 20 / 8) / 2})
    assert table["genai plain"].tokens_per_s == pytest.approx(((1000 / 4 + 1000 / 8) / 2 + 50) / 2)
    best = fastest_peer(rows(MODES, record(speeds)))
    assert best is not None
    assert best.mode == "genai ngram 2"


def test_unpaired_runs_count_in_no_ratio() -> None:
    made = record({"specrun baseline": [[4]], "genai plain": [[2, 1], [1, 1]]})
    table = by_mode(made)
    assert table["genai plain"].to_baseline == pytest.approx(2)
    assert table["genai plain"].specrun == {}
    assert table["specrun baseline"].to_own_plain is None
    assert "genai ngram 2" not in table


def test_texts_against_the_own_plain_one() -> None:
    made = record({"specrun plain": [[5, 5], [5, 5]], "genai plain": [[5, 5], [5, 5]]})
    for prompt, repeat, text in [("0", 0, TEXT), ("0", 1, [5, 6, 0, 8]), ("1", 0, TEXT), ("1", 1, TEXT)]:
        made.add_run(make_run("genai ngram 2", prompt, repeat, 5, text))
    made.add_fact("reference", "0", [5, 6, 7, 9])
    made.add_fact("reference", "1", [5, 0, 7, 9])
    made.add_fact("agreement", "genai", [9, 10])
    table = by_mode(made)
    assert (table["genai ngram 2"].text_kept, table["genai ngram 2"].prompts) == (1, 2)
    assert table["genai plain"].text_kept == 2
    assert table["genai plain"].equal_first == 2  # 3 and 1
    assert table["genai plain"].next_token == (9, 10)
    assert table["genai ngram 2"].next_token is None
    assert table["specrun plain"].next_token is None


def test_the_printed_table() -> None:
    made = record({"specrun baseline": [[4]], "specrun plain": [[5]], "specrun ngram": [[2]], "genai plain": [[4]]})
    made.add_fact("reference", "0", TEXT)
    made.add_fact("agreement", "genai", [39, 40])
    printed = format_table(rows(MODES, made))
    head, *lines, last = printed.split("\n")
    assert head.split("  ")[0] == "mode"
    assert " ".join(lines[-1].split()) == "genai plain 250.0 1.000 1.000 1 of 1 97.5% 4 0.80 2.00"
    assert " ".join(lines[0].split()) == "specrun baseline 250.0 1.000 1.250 1 of 1 4 0.80 2.00"
    assert last == "Fastest of the peers: genai plain. Times as fast as it, specrun: plain 0.80, ngram 2.00"
    assert format_table([]).startswith("mode")


def test_idle_load_weighs_by_time() -> None:
    made = record({"specrun plain": [[5, 5]]})
    for run, idle in zip(made.runs, ([1.0, 0.0], [3.0, 0.4]), strict=True):
        run.idle["genai"] = idle
    assert idle_loads(made.runs) == {"genai": pytest.approx(0.1)}


def test_cuts() -> None:
    assert cuts(10, 4) == [0, 2, 5, 7]
    assert cuts(3, 40) == [0, 1, 2]
    assert cuts(0, 4) == []
