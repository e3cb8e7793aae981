"""`specrun bench` names below its tables what is slower than plain decoding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from click.testing import CliRunner

from specrun.cli.bench_tables import Found
from specrun.cli.main import main
from specrun.runtime import bench_summary
from specrun.runtime.bench_runs import Bench, Run
from specrun.runtime.bench_summary import Summary

from .test_bench import summary

RATIOS = {"baseline": 1.0, "none": 0.9, "ngram": 1.2, "lookahead:2/3/2": 0.8}


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("lookahead", [0.8, 1.1])
def test_what_loses_is_named(monkeypatch: pytest.MonkeyPatch, lookahead: float) -> None:
    summarise = bench_summary.summarise

    def scaled(runs: Iterable[Run]) -> list[Summary]:
        ratios = RATIOS | {"lookahead:2/3/2": lookahead}
        return [replace(row, ratio=ratios[row.method]) for row in summarise(runs)]

    monkeypatch.setattr(bench_summary, "summarise", scaled)
    arguments = ["bench", "--model", "tiny", "--max-tokens", "4", "--repeats", "1"]
    result = CliRunner().invoke(main, [*arguments, "--methods", "none,ngram,lookahead:2/3/2"])
    assert result.exit_code == 0, result.stderr
    said = result.stderr.splitlines()[-1] == "Slower here than plain decoding: lookahead:2/3/2"
    assert said == (lookahead < 1.0)


def test_by_all_prompts_of_a_model() -> None:
    """Not by one category; the model is told where there are several."""
    rows = [
        summary(model=model, category=category, method=method, ratio=ratio)
        for model, method, ratios in (
            ("a", "baseline", (1.0, 1.0)),
            ("a", "none", (0.9, 0.9)),
            ("a", "ngram", (0.8, 1.1)),
            ("a", "lookahead", (1.1, 0.8)),
            ("b", "ngram", (0.7, 0.9)),
        )
        for category, ratio in zip(("qa", "all"), ratios, strict=True)
    ]
    benches = [Bench({"model": model}, (), ()) for model in "ab"]
    assert Found("", {}, benches[:1], rows[:8]).losing == ["lookahead"]
    assert Found("", {}, benches, rows).losing == ["lookahead (a)", "ngram (b)"]
