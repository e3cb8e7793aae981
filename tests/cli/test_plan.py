"""`specrun plan`: tables, JSON, pictures, refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from specrun.cli.main import main
from specrun.cli.plan import SECTIONS, plan
from specrun.models_cache.layout import find_bundle
from specrun.runtime import cost_model
from specrun.runtime.calibration import Calibration
from specrun.runtime.engine import Engine

from ..runtime import tiny_heads


def run_plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments])


def shown(*arguments: str) -> list[list[str]]:
    result = run_plan(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return [line.split() for line in result.stdout.splitlines()]


def answer(*arguments: str) -> dict[str, Any]:
    result = run_plan(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_the_essays_table_stands_beside_the_right_one() -> None:
    result = run_plan()
    assert (result.exit_code, result.stderr) == (0, "")
    text = result.stdout
    assert text.startswith("S = (1 - alpha^(K+1)) / ((1 - alpha)(K phi + 1))")
    lines = [line.split() for line in text.splitlines()]
    at = lines.index(["alpha", "K", "tokens/round", "S", "essay's", "S"])
    assert lines[at + 1 : at + 5] == [
        ["0.50", "2", "1.75", "1.46", "1.35"],
        ["0.70", "5", "2.94", "1.96", "1.86"],
        ["0.75", "5", "3.29", "2.19", "2.03"],
        ["0.90", "8", "6.13", "3.40", "2.59"],
    ]
    for right in ("34.4 GB", "phi = (K-1)/K", "0.999999996 (99.2 % is N = 4)", "56.25 % (right)"):
        assert right in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_essay_in_json() -> None:
    value = answer()["essay"]
    for row, wanted in zip(value["speedups"], (1.46, 1.96, 2.19, 3.40), strict=True):
        assert row["speedup"] == cost_model.speedup(row["alpha"], row["draft_length"], row["phi"])
        assert round(row["speedup"], 2) == wanted
        assert row["printed"] < row["speedup"]
    assert [figure["value"] for figure in value["figures"]][:3] == [2**35, 3 * 2**35, 0.8]


def test_speed() -> None:
    lines = shown("--alpha", "0.9,0.7", "--draft-length", "1-3,8", "--phi", "0.05")
    rows = [line for line in lines if line and line[0] in ("0.7", "0.9")]
    assert [(row[0], row[1]) for row in rows] == [
        *[("0.7", k) for k in ("1", "2", "3", "6", "8")],
        *[("0.9", k) for k in ("1", "2", "3", "8", "13")],
    ]
    assert [row for row in rows if row[-1].endswith("*")] == [
        ["0.7", "6", "3.06", "2.35*"],
        ["0.9", "13", "7.71", "4.67*"],
    ]


def test_speed_in_json() -> None:
    value = answer("--alpha", "0.7", "-k", "5")["speed"]
    assert (value["phi"], value["measured"], value["best"][0]["draft_length"]) == (0.1, None, 4)
    row = value["rows"][-1]
    assert (row["draft_length"], row["speedup"]) == (5, cost_model.speedup(0.7, 5, 0.1))
    limits = answer("--alpha", "0,1", "-k", "0-2", "--phi", "0")["speed"]
    assert [row["speedup"] for row in limits["rows"]] == [1.0, 1.0, 1.0, 1.0, 2.0, 3.0, 65.0]


@pytest.mark.usefixtures("tiny")
def test_a_models_measured_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    calibration = Calibration(1, {1: 0.010, 2: 0.012, 17: 0.042})
    monkeypatch.setattr("specrun.runtime.engine.calibrate", lambda *arguments, **options: calibration)
    result = run_plan("--model", "tiny", "--alpha", "0.8", "-k", "1,16", "--threads", "1")
    assert result.exit_code == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [
        "v(n)",
        "1.00",
        "1.20",
        "1.40",
        "1.60",
        "1.80",
        "2.00",
        "2.20",
        "2.40",
        "2.60",
        "3.00",
        "3.40",
        "4.20",
    ] in lines
    assert "tiny on this machine, 1 threads: a plain step takes 10 ms" in result.stdout
    assert "phi = 0" in result.stdout
    assert ["0.8", "16", "4.89", "4.89*", "1.16"] in lines
    value = answer("--model", "tiny", "--alpha", "0.8", "-k", "1,16", "--threads", "1")["speed"]
    assert value["measured"]["v"]["17"] == pytest.approx(4.2)
    assert value["measured"]["draft"]["method"] == "ngram"
    costs = {int(width): cost for width, cost in value["measured"]["v"].items()}
    for row in value["rows"]:
        assert row["speedup_measured"] == cost_model.speedup_measured(0.8, row["draft_length"], 0.0, costs)
    assert "memory" not in answer("--model", "tiny", "--threads", "1")


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("name", ["medusa", "eagle", "draft"])
def test_a_speculators_costs_and_acceptance(name: str) -> None:
    tiny_heads_of_tiny()
    arguments = ("--model", "tiny", "--draft", name, "--threads", "1", "--positions", "512")
    value = answer(*arguments)
    draft = value["speed"]["measured"]["draft"]
    assert draft["name"] == name
    assert draft["alpha"] == pytest.approx(cost_model.equivalent_alpha((0.45, 0.4, 0.4)))
    assert {row["alpha"] for row in value["speed"]["rows"]} == {draft["alpha"]}
    assert value["speed"]["most"] == (3 if name == "medusa" else 16)
    memory = value["memory"]
    assert memory["target_bytes"] == 2 * 2 * 2 * 16 * 512 * 4
    assert (memory["draft_bytes"] == 0) is (name == "medusa")
    assert memory["dual_bytes"] == memory["target_bytes"] + memory["draft_bytes"] < memory["naive_bytes"]
    text = run_plan(*arguments).stdout
    assert f"drafts of {name}: " in text
    assert "by depth 0.45, 0.40, 0.40" in text
    assert f"alpha = {draft['alpha']:.4g} has the tokens a round" in text


def tiny_heads_of_tiny() -> None:
    """Random speculators for the model of the fixture."""
    bundle = find_bundle("tiny")
    from specrun.export.speculator_config import DraftConfig, EagleConfig, MedusaConfig
    from specrun.export.speculators import attach_speculator

    for name, config in (
        ("medusa", MedusaConfig(3, 1)),
        ("eagle", EagleConfig("eagle3", **tiny_heads.SIZES)),
        ("draft", DraftConfig(layers=1, **tiny_heads.SIZES)),
    ):
        taps = () if name == "draft" else (2,)
        attach_speculator(bundle, tiny_heads.speculator(bundle, name, config, taps=taps))


@pytest.mark.usefixtures("tiny")
def test_a_model_that_drafts() -> None:
    value = answer("--model", "tiny", "--draft", "tiny", "--threads", "1", "--batch", "2")
    draft = value["speed"]["measured"]["draft"]
    assert (draft["method"], draft["alpha"], len(value["speed"]["best"])) == ("draft", None, 5)
    assert draft["phi"] == 1.0  # its own kept calibration
    memory = value["memory"]
    assert (memory["batch"], memory["positions"]) == (2, 16384)
    assert memory["share_of_naive"] == pytest.approx(2 / 3)
    assert "its alpha is not known" in run_plan("--model", "tiny", "--draft", "tiny", "--threads", "1").stdout


def test_memory_of_a_shape() -> None:
    arguments = ("--shape", "llama-7b", "--draft-shape", "2x12x64", "--batch", "32", "--positions", "2048")
    result = run_plan(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["target", "llama-7b", "32", "32", "128", "2", "34.4", "GB", "(32.0", "GiB)"] in lines
    assert ["draft", "2x12x64", "2", "12", "64", "2", "402.7", "MB"] in lines
    assert "naive, 3 L d b: 103.1 GB (96.0 GiB)" in result.stdout
    assert "the above is 33.7 % of it" in result.stdout
    value = answer(*arguments)
    assert list(value) == ["memory"]
    assert value["memory"]["target_bytes"] == 34_359_738_368
    assert answer("--shape", "1x1x1")["memory"]["positions"] == 2048


def test_best_of_n_and_pass_at_k() -> None:
    text = run_plan("--best-of", "16", "--prefix", "768", "--suffix", "512", "--p", "0.7").stdout
    assert "saves 56.25 % of the KV, 8,960 positions instead of 20,480" in text
    assert "one or more right: 0.999999996 at p = 0.7" in text
    value = answer("--best-of", "4", "--p", "0.7", "--pass-at-k", "200", "37", "10")
    assert list(value) == ["best_of", "pass_at_k"]
    assert value["best_of"]["coverage"] == pytest.approx(0.9919, abs=1e-12)
    assert value["pass_at_k"]["pass_at_k"] == cost_model.pass_at_k(200, 37, 10)
    assert shown("--pass-at-k", "5", "2", "1")[0][:3] == ["pass@1", "=", "0.4,"]


def test_sections_stand_one_below_the_other() -> None:
    text = run_plan("--alpha", "0.5", "--shape", "llama-7b", "--best-of", "2", "--p", "0.5").stdout
    places = [text.index(part) for part in ("S = ", "KV memory", "Best of 2")]
    assert places == sorted(places)
    assert "essay" not in text


def test_a_picture_as_svg(tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    result = run_plan("--alpha", "0.5,0.9", "--plot", str(path))
    assert (result.exit_code, result.stderr) == (0, f"picture: {path}\n")
    root = ElementTree.parse(path).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    text = path.read_text(encoding="utf-8")
    for label in ("speed-up S over plain decoding", "K, draft tokens a round", "phi = 0.1", "alpha", "0.5", "0.9"):
        assert f"<!-- {label}" in text, label
    assert [entry.name for entry in tmp_path.iterdir() if entry.suffix != ".svg" and entry.is_file()] == []


@pytest.mark.usefixtures("tiny")
def test_a_picture_with_the_measured_form_beside_it(tmp_path: Path) -> None:
    for number, arguments in enumerate([(), ("--model", "tiny", "--threads", "1")]):
        result = run_plan("--plot", str(tmp_path / f"{number}.PNG"), *arguments, "--json")
        assert result.exit_code == 0, result.stderr
        assert list(json.loads(result.stdout)) == ["speed"]
    alone, beside = ((tmp_path / f"{number}.PNG").read_bytes() for number in range(2))
    assert alone.startswith(b"\x89PNG\r\n\x1a\n")
    widths = [int.from_bytes(data[16:20], "big") for data in (alone, beside)]
    assert widths[1] > 1.5 * widths[0]


def test_a_picture_leaves_no_global_state(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom specrun.cli.main import main\n"
        f"main(['plan', '--plot', {str(tmp_path / 'a.png')!r}], standalone_mode=False)\n"
        "assert 'matplotlib.figure' in sys.modules and 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_without_a_picture_or_a_model_little_is_loaded() -> None:
    code = (
        "import sys\nfrom specrun.cli.main import main\nmain(['plan'], standalone_mode=False)\n"
        "assert not {'matplotlib', 'onnxruntime', 'torch', 'onnx', 'specrun.export'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_a_picture_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run_plan("--plot", str(tmp_path / "a.svg"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "Error: Pictures need matplotlib: install it with `pip install 'specrun[plot]'`.\n"


def test_a_picture_that_cannot_be_drawn_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "__init__", None)
    for name, said in (("a.pdf", "a.pdf is neither"), ("a", "a is neither"), ("none/a.svg", "There is no folder")):
        result = run_plan("--model", "no-such-model", "--plot", str(tmp_path / name))
        assert (result.exit_code, result.stdout) == (2, "")
        assert said in result.stderr


def test_a_picture_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.svg"
    path.write_text("before")

    def full(*names: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specrun.cli.plan_picture.os.replace", full)
    result = run_plan("--plot", str(path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "No space left on device" in result.stderr
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_file()] == ["plan.svg"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--alpha", "1.5"), "numbers from 0 to 1"),
        (("--alpha", "nan"), "numbers from 0 to 1"),
        (("--alpha", ""), "numbers from 0 to 1"),
        (("--phi", "-0.1"), "phi must be 0 or more"),
        (("--phi", "nan"), "phi must be 0 or more"),
        (("-k", "x"), "is no number or range"),
        (("-k", "3-1"), "is no number or range"),
        (("-k", "-1"), "is no number or range"),
        (("-k", "0-999999999"), "from 0 to 4096"),
        (("-k", ","), "names nothing"),
        (("--draft", "eagle"), "--draft says nothing without --model"),
        (("--threads", "1"), "--threads says nothing without --model"),
        (("--batch", "2"), "--batch says nothing without --model or --shape"),
        (("--draft-shape", "1x1x1"), "--draft-shape says nothing without --shape"),
        (("--p", "0.5"), "--p says nothing without --best-of"),
        (("--model", "tiny", "--shape", "1x1x1"), "leave one of them out"),
        (("--shape", "gpt"), "'gpt' is no shape: give llama-7b"),
        (("--shape", "llama-7b", "--positions", "0"), "positions"),
        (("--best-of", "2"), "give --prefix and --suffix"),
        (("--best-of", "2", "--prefix", "3"), "give --prefix and --suffix"),
        (("--best-of", "2", "--p", "2"), "p must be between 0 and 1"),
        (("--pass-at-k", "5", "6", "1"), "c must be at most n"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], said: str) -> None:
    result = run_plan(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.usefixtures("tiny")
def test_what_a_model_does_not_reach() -> None:
    result = run_plan("--model", "tiny", "-k", "17", "--threads", "1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "at most 16 tokens a round" in result.stderr
    result = run_plan("--model", "tiny", "--positions", "20000", "--threads", "1")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "a context of 16384 positions" in result.stderr
    assert run_plan("--model", "no-such-model").exit_code == 1


def test_the_help_page_lists_each_option_once_under_its_title() -> None:
    page = run_plan("--help").stdout
    titles = [page.index(f"\n{title}:\n") for title in SECTIONS]
    assert titles == sorted(titles)
    assert sorted(name for names in SECTIONS.values() for name in names) == sorted(
        str(parameter.name) for parameter in plan.params
    )
    assert "--help" in page[titles[-1] :]
