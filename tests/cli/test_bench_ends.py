"""`specrun bench` does not lose its figures at the end, nor an older report."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from specrun.cli.bench_tables import Found
from specrun.cli.main import main

from .test_bench import bench


def test_a_category_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for line in ('{"category": "\\ud800", "prompt": "x"}', '{"prompt": "\\ud800"}', '{"id": "\\ud800", "prompt": "x"}'):
        path.write_text(f'{{"prompt": "sound"}}\n{line}\n')
        result = CliRunner().invoke(main, ["bench", "--model", "no-such-model", "--prompts", str(path)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert "prompts.jsonl line 2 is no prompt" in result.stderr


@pytest.mark.usefixtures("tiny")
def test_an_older_report_outlives_a_call_that_fails(tmp_path: Path) -> None:
    page, runs = tmp_path / "report.html", tmp_path / "runs.jsonl"
    page.write_text("older")
    runs.write_text("something else\n")
    assert bench("--report", str(page), "--output", str(runs)).exit_code == 1
    assert page.read_text() == "older"
    assert bench("--report", str(tmp_path / "new.html"), "--output", str(runs)).exit_code == 1
    assert not (tmp_path / "new.html").exists()


@pytest.mark.usefixtures("tiny")
def test_the_tables_come_before_a_report_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, found: Found) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("specrun.cli.bench_report.write_report", fail)
    result = bench("--report", str(tmp_path / "report.html"))
    assert result.exit_code == 1
    assert result.stdout.startswith("category")
    assert "No space left on device" in result.stderr
