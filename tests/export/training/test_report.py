"""The picture of a training is sound XML whatever was measured."""

from __future__ import annotations

import dataclasses
from typing import Any
from xml.etree import ElementTree

import pytest

from specrun.export.training.report import draw_report

from ..tiny_speculators import tiny_speculator

CURVES: list[list[Any]] = [[], [(2048, 5.0, 1.0)], [(2048, 5.0, 1.2), (4096, 4.0, 2.7)]]


@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("acceptance", [(), ((),), ((0.5, 0.2), (1.0,)), tuple((0.1,) * 8 for _ in range(4))])
def test_a_picture(curve: list[Any], acceptance: tuple[tuple[float, ...], ...]) -> None:
    base = tiny_speculator("medusa")
    target = dataclasses.replace(base.target, name="<b> & co")
    report = {"curve": curve, "held_out": {"mean_accepted_tokens": 1.234}}
    text = draw_report(dataclasses.replace(base, target=target, acceptance=acceptance, report=report))
    root = ElementTree.fromstring(text)
    words = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert f"medusa for <b> & co: 1.23 tokens a round on held-out text, as a chain of {len(acceptance)}" in words
    assert "nan" not in text
    bars = [element for element in root.iter("{http://www.w3.org/2000/svg}rect") if element.get("fill") != "none"]
    assert len(bars) == 1 + sum(min(len(row), 4) for row in acceptance)
