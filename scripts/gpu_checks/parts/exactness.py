"""Whether speculation changes a text on the device, and whether a row's bits depend on its place in a pinned run."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_checks import models
from gpu_checks.child import Report
from gpu_checks.context import Context
from specrun.models_cache.errors import SpecrunError
from specrun.runtime.session import ModelSession, WidthRule
from specrun.runtime.verify import VerifyCase, verify

BASE = 32  # tokens before those that are compared
COUNT = 48  # tokens that are compared


def run(context: Context, report: Report) -> None:
    """For each precision the rows of a run at pinned widths, then `specrun verify`."""
    amounts = context.amounts
    rule: dict[str, Any] = {}
    cases: list[VerifyCase] = []
    rows: list[dict[str, Any]] = []
    pinned: list[dict[str, Any]] = []
    for precision in amounts.precisions:
        bundle = models.bundle_of(precision, context.device)
        ids = models.text_ids(bundle, BASE + COUNT + max(amounts.pinned))
        session = models.open_session(context, bundle, context.device)
        session.width_rule = WidthRule(multiple=1)
        pinned += [{"precision": precision, **_pinned(session, ids, width)} for width in amounts.pinned]
        session.close()
        report.add(pinned_rows=pinned)
    for precision in amounts.precisions:
        with models.open_engine(context, precision) as engine:
            methods = [method for method in amounts.methods if method in engine.methods and method != "none"]
            prompts = models.PROMPTS[: max(1, amounts.prompts // 2)]
            try:
                own: list[VerifyCase] = []
                for case in verify(
                    engine,
                    prompts,
                    methods=methods,
                    draft_lengths=amounts.verify_lengths,
                    max_tokens=amounts.verify_tokens,
                ):
                    own.append(case)
                    rule[precision] = engine.calibration.exactness
                    report.add(verify=[*rows, *_by_method(precision, own)], exactness=rule)
                rows += _by_method(precision, own)
                cases += own
            except SpecrunError as error:
                report.add(**{f"{precision}_error": str(error)})
                raise
    report.add(unequal=sum(not case.equal for case in cases), cases=len(cases))


def _by_method(precision: str, cases: list[VerifyCase]) -> list[dict[str, Any]]:
    """A row for each method: how many combinations of K and sampling were equal, and the first difference."""
    found: dict[str, list[VerifyCase]] = {}
    for case in cases:
        found.setdefault(case.method, []).append(case)
    return [
        {
            "precision": precision,
            "method": method,
            "cases": len(own),
            "equal": sum(case.equal for case in own),
            "tokens": sum(case.tokens for case in own),
            "difference": next(
                (
                    f"K {case.draft_length or 'adaptive'}, {case.sampling}, {case.difference}"
                    for case in own
                    if not case.equal
                ),
                None,
            ),
        }
        for method, own in found.items()
    ]


def _pinned(session: ModelSession, ids: list[int], width: int) -> dict[str, Any]:
    """Runs of `width` positions, always: each token in the first place with junk behind it, and all in their places.

    Equal rows mean that a token's logits do not depend on which place of the run it stands in, nor on what else is
    run: then speculation of K = width - 1 is exact to the last bit. largest: the greatest difference of a logit.
    undecided: the share of positions whose two best logits are nearer to each other than twice that.
    """
    vocabulary = session.sizes.tokens
    alone = _alone(session, ids, width, vocabulary, 7919)
    other = _alone(session, ids, width, vocabulary, 104729)
    session.rewind_to(BASE)
    pieces = [
        np.array(session.run(ids[start : start + width], rows=width), np.float32)
        for start in range(BASE, BASE + COUNT, width)
    ]
    together = np.concatenate(pieces)[:COUNT]
    largest = float(np.abs(together - alone).max())
    best = np.sort(alone, axis=1)[:, -2:]
    return {
        "width": width,
        "junk_matters": not np.array_equal(alone, other),
        "equal_rows": float(np.mean(np.all(together == alone, axis=1))),
        "largest": largest,
        "argmax_flips": int(np.sum(together.argmax(1) != alone.argmax(1))),
        "undecided": float(np.mean(best[:, 1] - best[:, 0] <= 2 * largest)) if largest else 0.0,
    }


def _alone(session: ModelSession, ids: list[int], width: int, vocabulary: int, step: int) -> NDArray[np.float32]:
    session.rewind_to(0)
    session.run(ids[:BASE], rows=1)
    rows = []
    for place in range(BASE, BASE + COUNT):
        junk = [(place * step + step * slot) % vocabulary for slot in range(1, width)]
        rows.append(np.array(session.run([ids[place], *junk], rows=width)[0], np.float32))
        session.rewind_to(place + 1)
    return np.stack(rows)
