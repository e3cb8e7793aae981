"""Whether speculation changes a text on the device, and whether a row's bits depend on its place in a pinned run."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_checks import models
from gpu_checks.child import Report, for_each
from gpu_checks.context import Context
from specrun.runtime.calibration import Calibration
from specrun.runtime.session import ModelSession
from specrun.runtime.verify import VerifyCase, verify

BASE = 32  # tokens before those that are compared
COUNT = 48  # tokens that are compared


def run(context: Context, report: Report) -> None:
    """For each precision the rows of a run at pinned widths, then `specrun verify`."""
    amounts = context.amounts
    exact: dict[str, str] = {}
    probed: dict[str, Calibration] = {}
    rules: dict[str, dict[str, Any]] = {}
    cases: dict[str, list[VerifyCase]] = {}
    pinned: list[dict[str, Any]] = []

    def check(precision: str) -> None:
        with models.open_engine(context, precision) as engine:
            ids = models.text_ids(engine, BASE + COUNT + max(amounts.pinned))
            session = models.open_rows(engine)
            for width in amounts.pinned:
                pinned.append({"precision": precision, **_pinned(session, ids, width)})
                report.add(pinned_rows=pinned)
            session.cache.close()
            prompts = models.PROMPTS[: max(1, amounts.prompts // 2)]
            how: dict[str, Any] = {
                "draft_lengths": amounts.verify_lengths,
                "batch_sizes": amounts.verify_batches,
                "max_tokens": amounts.verify_tokens,
            }
            with models.usable(engine, [name for name in amounts.methods if name not in ("none", "auto")]) as methods:
                for case in verify(engine, prompts, methods=methods, **how):
                    cases[precision] = [*cases.get(precision, []), case]
                    found = probed[precision] = engine.calibration
                    exact[precision] = found.exactness
                    rules[precision] = {**asdict(found.rule), "bound": found.bound, "batch_bound": found.batch_bound}
                    rows = [row for name, own in cases.items() for row in _by_method(name, own)]
                    report.add(exactness=exact, rule=rules, verify=rows)

    try:
        for_each(amounts.precisions, report, check)
    finally:
        every = [case for own in cases.values() for case in own]
        report.add(unequal=sum(not case.equal for case in every), cases=len(every))
    broken = [
        name for name, own in cases.items() if not all(_holds(case, _promised(case, probed[name])) for case in own)
    ]
    if broken:
        raise RuntimeError(f"Texts differ from plain decoding in {', '.join(broken)} by more than what is promised.")


def _holds(case: VerifyCase, exactness: str) -> bool:
    """Whether a case is what the probe promises: equal, or where it promises rounding only no more than its bound.

    exactness: of rows alone, or in a batch, as the case ran.
    """
    return case.equal or (exactness != "bitwise" and bool(getattr(case, "holds", True)))


def _promised(case: VerifyCase, found: Calibration) -> str:
    """What the probe promises for such a case."""
    return found.batch_exactness if getattr(case, "batch", 1) > 1 else found.exactness


def _rows(case: VerifyCase) -> str:
    batch = getattr(case, "batch", 1)
    return f"{batch} rows, " if batch > 1 else ""


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
                    f"K {case.draft_length or 'adaptive'}, {_rows(case)}{case.sampling}, {case.difference}"
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
        models.on_host(session.run(ids[start : start + width], rows=width))
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
        rows.append(models.on_host(session.run([ids[place], *junk], rows=width))[0])
        session.rewind_to(place + 1)
    return np.stack(rows)
