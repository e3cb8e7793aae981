"""`specrun bench`: its tables, its JSON, and a page that stands alone."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from specrun.cli.bench_pictures import colours, parts_picture, ratio_picture, synthetic_picture, tokens_picture
from specrun.cli.bench_report import report_page, write_report
from specrun.cli.bench_tables import Found
from specrun.cli.main import main
from specrun.cli.svg import Picture, scale, ticks
from specrun.runtime.bench_axes import Axes
from specrun.runtime.bench_environment import Sitting
from specrun.runtime.bench_runs import Bench
from specrun.runtime.bench_summary import Summary
from specrun.runtime.synthetic import SyntheticCell

NASTY = "<script>alert(\"1\")</script> & 'x'"
VOID = {"meta", "br"}


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "--model", "tiny", "--max-tokens", "8", "--repeats", "1", *arguments])


def table(text: str) -> list[list[str]]:
    """Cells stand two spaces apart."""
    return [re.split(r" {2,}", line) for line in text.splitlines()]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    lines = [{"question_id": n, "category": category, "turns": [f"{n} tides"]} for n, category in enumerate("aabb")]
    path.write_text("\n".join(map(json.dumps, [*lines, {"category": NASTY, "prompt": "x"}])))
    return path


# the command


@pytest.mark.usefixtures("tiny")
def test_the_tables_and_a_second_call(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    result = bench("--output", str(path))
    assert result.exit_code == 0, result.stderr
    speed, rounds, axes = map(table, result.stdout.split("\n\n"))
    assert speed[0] == ["category", "method", "prompts", "tokens/s", "ratio", "95 % CI", "MAT", "accept", "equal"]
    assert [row[1] for row in speed[1:]] == ["baseline", "none", "ngram"]
    assert speed[2][-1] == speed[3][-1] == "yes"
    assert re.fullmatch(r"\d+\.\d\d-\d+\.\d\d", speed[2][5])
    assert rounds[0][:6] == ["method", "ms prefill", "ms draft", "ms verify", "ms rest", "ms over"]
    assert [row[0] for row in rounds[1:]] == ["baseline", "none", "ngram"]
    assert axes[0] == ["method", "MB more", "MAT", "accept", "ratio", "trained on", "minutes"]
    assert [(row[0], row[1], row[-2], row[-1]) for row in axes[1:]] == [
        ("none", "0.0", "0", "0"),
        ("ngram", "0.0", "0", "0"),
    ]
    assert "processor " in result.stderr
    assert "tiny: precision" in result.stderr
    assert "load " in result.stderr
    kept = path.read_text()
    value = json.loads(bench("--output", str(path), "--json").stdout)
    assert path.read_text() == kept
    assert [row["method"] for row in value["summary"]] == ["baseline", "none", "ngram"]
    assert all(row["ratio_low"] <= row["ratio"] <= row["ratio_high"] for row in value["summary"])
    assert [row["method"] for row in value["axes"]] == ["none", "ngram"]
    assert value["models"][0]["model"] == "tiny"
    assert len(value["models"][0]["sittings"]) == 1
    assert {"processor", "cores", "specrun", "onnxruntime", "python"} <= set(value["environment"])
    assert value["synthetic"] == []
    assert shlex.split(value["command"])[:4] == ["specrun", "bench", "--model", "tiny"]
    other = bench("--output", str(path), "--draft-length", "2")
    assert (other.exit_code, other.stdout) == (2, "")
    assert "other settings" in other.stderr


@pytest.mark.usefixtures("tiny")
def test_several_models(tiny_source: Path, tmp_path: Path) -> None:
    second = tmp_path / "second-model"
    assert CliRunner().invoke(main, ["export", str(tiny_source), "--output", str(second)]).exit_code == 0
    arguments = ["--methods", "none", "--output", str(tmp_path / "runs.jsonl")]
    result = bench("--model", str(second), *arguments)
    assert (result.exit_code, result.stdout) == (2, "")  # it has the name of the first
    assert "one name" in result.stderr
    assert (
        CliRunner().invoke(main, ["export", str(tiny_source), "--name", "other", "--precision", "fp32"]).exit_code == 0
    )
    result = bench("--model", "other", *arguments)
    assert result.exit_code == 0, result.stderr
    speed, _, axes = map(table, result.stdout.split("\n\n"))
    assert speed[0][0] == "model"
    assert [(row[0], row[2]) for row in speed[1:]] == [
        (model, method) for model in ("tiny", "other") for method in ("baseline", "none")
    ]
    assert [row[0] for row in axes[1:]] == ["tiny", "other"]
    assert "other: precision fp32" in result.stderr
    missing = bench("--model", "nowhere")
    assert (missing.exit_code, missing.stdout) == (1, "")
    assert "warming" not in missing.stderr  # said before anything is timed


@pytest.mark.usefixtures("tiny")
def test_all_methods() -> None:
    value = json.loads(bench("--methods", "all", "--json").stdout)
    assert [row["method"] for row in value["axes"]] == ["none", "ngram", "lookahead"]


@pytest.mark.usefixtures("tiny")
def test_synthetic_acceptance(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    arguments = ["--synthetic-acceptance", "0.5,0.9", "--draft-lengths", "1,4", "--report", str(page)]
    result = bench(*arguments)
    assert result.exit_code == 0, result.stderr
    header, *rows = table(result.stdout)
    assert header[:3] == ["drafts", "alpha", "K"]
    assert {"E", "MAT", "S", "predicted", "error", "S none", "theorem", "equal"} <= set(header)
    assert [tuple(row[:3]) for row in rows] == [("none", a, k) for k in ("1", "4") for a in ("0", "0.5", "0.9")]
    assert all(row[-1] == "yes" for row in rows)
    assert "tiny has no draft: drafting costs nothing here" in result.stderr
    parsed = check_page(page.read_text(encoding="utf-8"))
    assert "alpha 0, K" not in parsed.text  # the costs come from there: no point in drawing it
    assert "alpha 0.9, K 4" in parsed.text
    value = json.loads(bench(*arguments, "--json").stdout)
    assert value["summary"] == value["axes"] == []
    cell = value["synthetic"][-1]
    assert (cell["acceptance"], cell["draft_length"]) == (0.9, 4)
    assert cell["error"] == pytest.approx(cell["predicted"] / cell["speedup"] - 1)
    assert value["command"].endswith(shlex.join([*arguments, "--json"]))


@pytest.mark.usefixtures("tiny")
def test_the_page(prompts: Path, tmp_path: Path) -> None:
    page = tmp_path / "report page.html"
    result = bench("--prompts", str(prompts), "--methods", "none,ngram:2", "--report", str(page))
    assert result.exit_code == 0, result.stderr
    parsed = check_page(page.read_text(encoding="utf-8"))
    assert NASTY in parsed.text
    assert parsed.tags.count("svg") == 3
    assert f"--report '{page}'" in parsed.text
    assert "--methods none,ngram:2" in parsed.text
    assert "load average" in parsed.text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--synthetic-acceptance", "1.5"), "0.5,0.9"),
        (("--synthetic-acceptance", "nan"), "0.5,0.9"),
        (("--synthetic-acceptance", "x"), "0.5,0.9"),
        (("--synthetic-acceptance", ","), "0.5,0.9"),
        (("--synthetic-acceptance", "0.5", "--draft-length", "2"), "--draft-lengths"),
        (("--synthetic-acceptance", "0.5", "--draft-lengths", "0"), "whole numbers"),
        (("--synthetic-acceptance", "0.5", "--methods", "ngram:4"), "ngram:4"),
        (("--synthetic-acceptance", "0.5", "--methods", "eagle+ngram"), "eagle+ngram"),
        (("--synthetic-acceptance", "0.5", "--methods", "all"), "not all"),
        (("--synthetic-acceptance", "0.5", "--methods", "lookahead"), "not lookahead"),
        (("--methods", "all,none"), "all"),
        (("--report", "nowhere/report.html"), "nowhere"),
        (("--report", f"{'x' * 300}.html"), "cannot be written"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    """Found before the model is looked for."""
    result = CliRunner().invoke(main, ["bench", "--model", "no-such-model", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "no-such-model" not in result.stderr


# the page


class Page(HTMLParser):
    """Collects text and attributes; every element must be closed where it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check_page(text: str) -> Page:
    """A whole page that asks for nothing from elsewhere and has no script."""
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    assert page.tags[:2] == ["html", "head"]
    assert not {"script", "link", "img", "iframe", "a", "object", "use", "image"} & set(page.tags)
    assert not {name for name, _ in page.attributes} & {"href", "src", "xlink:href", "srcset", "action", "style"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not re.search(r"https?:|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text
    assert "width=device-width" in text
    assert not re.search(r"\b(nan|inf|None)\b", page.text)
    return page


def summary(**changes: Any) -> Summary:
    values: dict[str, Any] = {
        "model": "m",
        "category": "qa",
        "method": "ngram",
        "prompts": 3,
        "tokens_per_s": 100.0,
        "ratio": 1.5,
        "ratio_low": 1.2,
        "ratio_high": 1.9,
        "mean_accepted_tokens": 2.0,
        "acceptance_rate": 0.5,
        "prefill_ms": 3.0,
        "draft_ms": 1.0,
        "verify_ms": 8.0,
        "rest_ms": 0.5,
        "overhead_ms": 0.4,
        "weights_bytes": 10**8,
        "kv_target_bytes": 10**7,
        "kv_draft_bytes": 0,
        "equal": True,
    }
    return Summary(**(values | changes))


def cell(k: int, alpha: float, speedup: float, predicted: float) -> SyntheticCell:
    figures = [0.5, 2.0, 2.1, 0.1, 0.2, 1.5, 0.1, speedup, 1.0, predicted, 1.1, 1.9]
    return SyntheticCell("m", "draft", alpha, k, 100, *figures, True)


def found(**parts: Any) -> Found:
    model = {"model": "m", "digest": "0123456789abcdef0123", "precision": None, "exactness": "bitwise"}
    values: dict[str, Any] = {
        "command": "specrun bench",
        "machine": {"processor": "p"},
        "benches": [Bench(model, (Sitting("2026-11-30 10:00", []),), ())],
    }
    return Found(**(values | parts))


def test_names_are_escaped_wherever_they_stand() -> None:
    axes = [Axes(NASTY, NASTY, 5, 5, 1.5, 0.5, 1.2, None, None)]
    rows = [
        summary(model=NASTY, category=category, method=method)
        for category in (NASTY, "all")
        for method in ("baseline", NASTY)
    ]
    nasty = found(command=NASTY, machine={NASTY: NASTY}, rows=rows, axes=axes)
    nasty.benches[0].model["model"] = NASTY
    page = check_page(report_page(nasty))
    assert page.text.count(NASTY) > 15
    assert any(NASTY in (value or "") for _, value in page.attributes) is False  # labels are ours
    check_page(report_page(found(cells=[cell(1, 0.5, 1.0, 1.1)])))


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    write_report(tmp_path / "page.html", found(rows=[summary(category="a\ud800b")]))
    assert "a?b" in check_page((tmp_path / "page.html").read_text(encoding="utf-8")).text


def test_one_category_and_prompts_without_an_interval() -> None:
    lone = {"ratio_low": None, "ratio_high": None, "prompts": 1}
    rows = [summary(method="baseline", ratio=1.0, **lone), summary(**lone, equal=None)]
    axes = [Axes("m", "ngram", 0, 0, 2.0, 0.5, 1.5, 0, 0.0)]
    page = check_page(report_page(found(rows=rows, axes=axes)))
    assert "ngram" in page.text


# pictures


def shapes(picture: Picture, tag: str) -> list[dict[str, float]]:
    found = []
    for written in re.findall(rf"<{tag} ([^>]*)>", str(picture)):
        pairs = re.findall(r'([a-z0-9-]+)="(-?[0-9.]+)"', written)
        found.append({name: float(value) for name, value in pairs})
    return found


def inside(picture: Picture) -> None:
    """No shape leaves the picture."""
    match = re.search(r'viewBox="0 0 (\d+) (\d+)"', str(picture))
    assert match is not None
    width, height = map(int, match.groups())
    for tag in ("circle", "line", "rect", "text"):
        for shape in shapes(picture, tag):
            for name, value in shape.items():
                if name in ("x", "x1", "x2", "cx"):
                    assert 0 <= value <= width
                if name in ("y", "y1", "y2", "cy"):
                    assert 0 <= value <= height
    for point in re.findall(r"(-?[0-9.]+),(-?[0-9.]+)", " ".join(re.findall(r'points="([^"]*)"', str(picture)))):
        assert 0 <= float(point[0]) <= width
        assert 0 <= float(point[1]) <= height


def test_ratio_picture() -> None:
    rows = [
        summary(category=category, method=method, ratio=ratio, ratio_low=ratio - 0.3, ratio_high=ratio + 0.2)
        for category, method, ratio in (("qa", "a", 1.2), ("qa", "b", 2.4), ("all", "a", 1.8), ("all", "b", 0.9))
    ]
    picture = ratio_picture(rows, colours(["a", "b"]))
    inside(picture)
    dots = shapes(picture, "circle")
    assert len(dots) == 4
    per_unit = (dots[1]["cx"] - dots[0]["cx"]) / 1.2
    assert per_unit > 0
    for row, dot in zip(rows, dots, strict=True):
        assert dot["cx"] == pytest.approx(dots[0]["cx"] + (row.ratio - 1.2) * per_unit, abs=0.2)
        whisker = next(line for line in shapes(picture, "line") if line["y1"] == line["y2"] == dot["cy"])
        assert whisker["x1"] == pytest.approx(dot["cx"] - 0.3 * per_unit, abs=0.2)
        assert whisker["x2"] == pytest.approx(dot["cx"] + 0.2 * per_unit, abs=0.2)
    assert len({dot["cy"] for dot in dots}) == 4


def test_parts_picture() -> None:
    rows = [summary(method="a"), summary(method="b", draft_ms=0.0, verify_ms=5.0)]
    picture = parts_picture(rows)
    inside(picture)
    bars = shapes(picture, "rect")
    assert len(bars) == 8
    for row, own in zip(rows, (bars[:4], bars[4:]), strict=True):
        per_ms = own[1]["width"] / row.verify_ms
        for bar, time in zip(own, (row.draft_ms, row.verify_ms, row.rest_ms, row.prefill_ms), strict=True):
            assert bar["width"] == pytest.approx(per_ms * time, abs=0.2)
        for left, right in itertools.pairwise(own):
            assert left["x"] + left["width"] == pytest.approx(right["x"], abs=0.2)
        assert len({bar["y"] for bar in own}) == 1


def test_tokens_picture() -> None:
    rows = [summary(ratio=0.8, mean_accepted_tokens=1.1), summary(category="all", ratio=1.6, mean_accepted_tokens=3.0)]
    picture = tokens_picture(rows, rows[1:], colours(["ngram"]))
    inside(picture)
    small, large = shapes(picture, "circle")
    assert small["r"] < large["r"]
    assert small["cx"] < large["cx"]
    assert small["cy"] > large["cy"]  # up is faster


def test_synthetic_picture() -> None:
    cells = [cell(k, alpha, k * alpha, k * alpha + 0.2) for alpha in (0.5, 0.9) for k in (4, 1)]
    picture = synthetic_picture(cells, colours(["alpha 0.5", "alpha 0.9"]))
    inside(picture)
    dots = shapes(picture, "circle")
    assert [dot["cx"] for dot in dots] == [dots[0]["cx"], dots[1]["cx"]] * 2
    assert dots[0]["cx"] < dots[1]["cx"]
    lines = re.findall(r'<polyline [^>]*points="([^"]*)"', str(picture))
    per_unit = (dots[0]["cy"] - dots[1]["cy"]) / (2.0 - 0.5)
    for line, own in zip(lines, (dots[:2], dots[2:]), strict=True):
        points = [tuple(map(float, point.split(","))) for point in line.split()]
        for (x, y), dot in zip(points, own, strict=True):
            assert x == dot["cx"]
            assert y == pytest.approx(dot["cy"] - 0.2 * per_unit, abs=0.2)
    inside(synthetic_picture(cells[:1], colours(["alpha 0.5"])))


@pytest.mark.parametrize(
    ("low", "high", "wanted"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.95, 2.6, [0.5, 1, 1.5, 2, 2.5, 3]), (0, 370, [0, 100, 200, 300, 400])],
)
def test_ticks(low: float, high: float, wanted: list[float]) -> None:
    assert ticks(low, high) == wanted


def test_ticks_of_nothing() -> None:
    marks = ticks(1.0, 1.0)
    assert marks[0] <= 1.0 < marks[-1]
    assert scale(2.0, 2.0, 0.0, 10.0)(2.0) == 0.0
