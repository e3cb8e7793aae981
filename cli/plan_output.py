"""How `specrun plan` shows what it computed: each section as lines of text and as a JSON value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from specrun.runtime import essay as essay_figures
from specrun.runtime.measured_costs import DraftCosts, MeasuredCosts
from specrun.runtime.plan import FORMULA, MEASURED_FORMULA, MemoryPlan, PassAtK, SamplesPlan, SpeedPlan, SpeedRow

_SHOWN_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the output: its key in the JSON object, its value there, its lines."""

    key: str
    value: Any
    lines: list[str]


def essay() -> Section:
    """What the essay prints beside what its formulas give."""
    rows, others = essay_figures.SPEEDUPS, essay_figures.figures()
    value = {
        "formula": FORMULA,
        "speedups": [
            asdict(row) | {"phi": row.phi, "tokens_per_round": row.tokens_per_round, "speedup": row.speedup}
            for row in rows
        ],
        "figures": [asdict(figure) for figure in others],
    }
    lines = [
        f"{FORMULA}   (Leviathan et al. 2023, theorem 3.8)",
        f"phi = {essay_figures.PHI:g}; the essay that specrun began with prints other values for the same formula",
        "",
        *_table(
            ("alpha", "K", "tokens/round", "S", "essay's S"),
            [
                (
                    f"{row.alpha:.2f}",
                    str(row.draft_length),
                    f"{row.tokens_per_round:.2f}",
                    f"{row.speedup:.2f}",
                    f"{row.printed:.2f}",
                )
                for row in rows
            ],
        ),
        "",
        *_table(
            ("other figures", "the essay's", "formula", "right"),
            [(figure.figure, figure.printed, figure.formula, figure.right) for figure in others],
        ),
    ]
    return Section("essay", value, lines)


def speed(plan: SpeedPlan) -> Section:
    """Speed-ups by alpha and K."""
    value: dict[str, Any] = {
        "formula": FORMULA,
        "measured_formula": MEASURED_FORMULA,
        "phi": plan.phi,
        "phi_first": plan.first,
        "most": plan.most,
        "rows": [asdict(row) for row in plan.rows],
        "best": [asdict(best) for best in plan.best],
        "measured": None,
    }
    lines = [f"{FORMULA}   (Leviathan et al. 2023, theorem 3.8)"]
    if plan.measured is not None:
        value["measured"] = asdict(plan.measured)
        value["measured"]["draft"]["alpha"] = plan.measured.draft.alpha
        lines += [f"{MEASURED_FORMULA.replace('S =', 'S measured =', 1)}   (S is over plain, exact decoding)", ""]
        lines += _costs(plan.measured)
        lines.append(_draft(plan.draft) if plan.draft is not None else f"phi = {plan.phi:.3g}")
    else:
        lines.append(f"phi = {plan.phi:.3g}; speculation gains only where alpha > phi")
    header = ["alpha", "K", "tokens/round", "S"] + (["S measured"] if plan.measured is not None else [])
    lines += ["", *_table(header, [_speed_cells(row, plan) for row in plan.rows])]
    lines.append(f"* the best K of 0 to {plan.most}; K = 0 is plain decoding")
    return Section("speed", value, lines)


def memory(plan: MemoryPlan) -> Section:
    """KV of target and draft against the naive scheme."""
    shapes = [("target", plan.target, plan.target_bytes)]
    if plan.draft is not None:
        shapes.append(("draft", plan.draft, plan.draft_bytes))
    value = asdict(plan) | {"share_of_naive": plan.share_of_naive}
    texts = f"{plan.batch} text{'s' if plan.batch > 1 else ''} of {plan.positions:,} positions"
    lines = [
        f"KV memory of {texts}: 2 x layers x KV heads x head size x bytes x positions x texts",
        "",
        *_table(
            ("", "model", "layers", "KV heads", "head size", "bytes", "KV"),
            [
                (
                    role,
                    shape.name,
                    str(shape.layers),
                    str(shape.kv_heads),
                    str(shape.head_dim),
                    str(shape.bytes_per_value),
                    _bytes(size),
                )
                for role, shape, size in shapes
            ],
        ),
        "",
        f"as specrun keeps it: {_bytes(plan.dual_bytes)}, one buffer each; a rollback only shortens a length",
        f"naive, 3 L d b: {_bytes(plan.naive_bytes)}, three buffers of the target's size; the above is "
        f"{100 * plan.share_of_naive:.1f} % of it",
    ]
    return Section("memory", value, lines)


def samples(plan: SamplesPlan) -> Section:
    """Best of n."""
    lines = [f"Best of {plan.n}"]
    if plan.saving is not None and plan.prefix is not None and plan.suffix is not None:
        alone, shared = plan.n * (plan.prefix + plan.suffix), plan.prefix + plan.n * plan.suffix
        lines.append(
            f"prefix stored once: saves {100 * plan.saving:.4g} % of the KV, "
            f"{shared:,} positions instead of {alone:,}   ((N-1) p / (N (p+l)))"
        )
    if plan.coverage is not None and plan.p is not None:
        lines.append(
            f"one or more right: {plan.coverage:.9f} at p = {plan.p:g}, "
            "the most that a choice can reach   (1 - (1-p)^N)"
        )
    return Section("best_of", asdict(plan), lines)


def pass_at_k(plan: PassAtK) -> Section:
    """The estimate from samples."""
    line = f"pass@{plan.k} = {plan.pass_at_k:.6g}, from {plan.c} right ones of {plan.n}   (1 - C(n-c, k) / C(n, k))"
    return Section("pass_at_k", asdict(plan), [line])


def _speed_cells(row: SpeedRow, plan: SpeedPlan) -> list[str]:
    best = next(best for best in plan.best if best.alpha == row.alpha)

    def marked(value: float, k: int | None) -> str:
        return f"{value:.2f}{'*' if row.draft_length == k else ''}"

    cells = [f"{row.alpha:.4g}", str(row.draft_length), f"{row.tokens_per_round:.2f}"]
    cells.append(marked(row.speedup, best.draft_length))
    if row.speedup_measured is not None:
        cells.append(marked(row.speedup_measured, best.draft_length_measured))
    return cells


def _costs(measured: MeasuredCosts) -> list[str]:
    widths = [width for width in _SHOWN_WIDTHS if width in measured.v]
    return [
        f"{measured.model} on this machine, {measured.threads} threads: "
        f"a plain step takes {1e3 * measured.step_s:.3g} ms",
        *_table(
            ("n", *map(str, widths)),
            [("v(n)", *(f"{measured.v[width]:.2f}" for width in widths))],
        ),
    ]


def _draft(draft: DraftCosts) -> str:
    if draft.method == "ngram":
        return "drafts of n-grams cost nothing: phi = 0"
    if draft.first == draft.phi:
        costs = f"phi = {draft.phi:.3g}"
    elif draft.phi == 0.0:
        costs = f"one run of {draft.first:.3g} steps drafts all, up to K = {draft.most}; that stands for K phi"
    else:
        costs = f"{draft.first:.3g} steps the first draft token, phi = {draft.phi:.3g} each further one"
    if draft.alpha is None:
        return f"drafts of {draft.name}: {costs}; its alpha is not known"
    by_depth = ", ".join(f"{chance:.2f}" for chance in draft.acceptance)
    return (
        f"drafts of {draft.name}: {costs}\n"
        f"alpha = {draft.alpha:.4g} has the tokens a round of its acceptance in training, by depth {by_depth}"
    )


def _bytes(count: int) -> str:
    """Decimal units, and the binary ones beside them from 1 GB on."""
    if count >= 1e9:
        return f"{count / 1e9:.1f} GB ({count / 2**30:.1f} GiB)"
    return f"{count / 1e6:.1f} MB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with a column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (header, *rows)
    ]
