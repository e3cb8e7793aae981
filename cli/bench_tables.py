"""What `specrun bench` found, as JSON and as tables of cells for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specrun.runtime.bench_axes import Axes
    from specrun.runtime.bench_runs import Bench
    from specrun.runtime.bench_summary import Summary
    from specrun.runtime.synthetic import SyntheticCell

NOTHING = "-"
CI_NAME = "95 % CI"

Cells = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Everything that one call found; `command` repeats it. Either `rows` and `axes` are empty or `cells` are."""

    command: str
    machine: dict[str, Any]
    benches: Sequence[Bench]
    rows: Sequence[Summary] = ()
    axes: Sequence[Axes] = ()
    cells: Sequence[SyntheticCell] = ()

    def to_json(self) -> dict[str, Any]:
        """The object of `--json`."""
        models = [
            bench.model | {"peak_bytes": bench.peak_bytes, "sittings": list(map(asdict, bench.sittings))}
            for bench in self.benches
        ]
        cells = [asdict(cell) | {"error": cell.error, "error_realised": cell.error_realised} for cell in self.cells]
        return {
            "command": self.command,
            "environment": self.machine,
            "models": models,
            "summary": list(map(asdict, self.rows)),
            "axes": list(map(asdict, self.axes)),
            "synthetic": cells,
        }

    @property
    def tables(self) -> list[list[Cells]]:
        """The tables that have rows, each with its header first."""
        found = [speed_table(self.rows), round_table(self.rows), axes_table(self.axes), synthetic_table(self.cells)]
        return [self.shown(table) for table in found if len(table) > 1]

    @property
    def losing(self) -> list[str]:
        """What is slower than plain decoding over all prompts of a model, which is named where there are several."""
        from specrun.runtime.bench_summary import totals

        rows = [row for row in totals(self.rows) if row.loses]
        return [f"{row.method} ({row.model})" if len(self.benches) > 1 else row.method for row in rows]

    def shown(self, table: list[Cells]) -> list[Cells]:
        """The table, without its first column, the model, where there is but one."""
        return table if len(self.benches) > 1 else [row[1:] for row in table]


def speed_table(rows: Iterable[Summary]) -> list[Cells]:
    """Speed by category and method; the model comes first, as in all tables here."""
    header = ("model", "category", "method", "prompts", "tokens/s", "ratio", CI_NAME, "MAT", "accept", "equal")
    return [header, *map(_speed, rows)]


def _speed(row: Summary) -> Cells:
    return (
        row.model,
        row.category,
        row.method,
        str(row.prompts),
        f"{row.tokens_per_s:.1f}",
        f"{row.ratio:.2f}",
        interval(row),
        f"{row.mean_accepted_tokens:.2f}",
        f"{row.acceptance_rate:.0%}",
        yes_or_no(row.equal),
    )


def round_table(rows: Iterable[Summary]) -> list[Cells]:
    """Time by part of the round, and memory, by method."""
    from specrun.runtime.bench_summary import totals

    header = ("model", "method", "ms prefill", "ms draft", "ms verify", "ms rest", "ms over")
    return [(*header, "MB weights", "MB KV", "MB draft KV"), *map(_round, totals(rows))]


def _round(row: Summary) -> Cells:
    times = (row.prefill_ms, row.draft_ms, row.verify_ms, row.rest_ms, row.overhead_ms)
    memory = map(megabytes, (row.weights_bytes, row.kv_target_bytes, row.kv_draft_bytes))
    return (row.model, row.method, *[f"{time:.2f}" for time in times], *memory)


def axes_table(axes: Iterable[Axes]) -> list[Cells]:
    """Memory beyond the target's, acceptance, training."""
    header = ("model", "method", "MB more", "MAT", "accept", "ratio", "trained on", "minutes")
    return [header, *map(_axes, axes)]


def _axes(row: Axes) -> Cells:
    tokens, minutes = row.training_tokens, row.training_minutes
    return (
        row.model,
        row.method,
        megabytes(row.weights_bytes + row.kv_bytes),
        f"{row.mean_accepted_tokens:.2f}",
        f"{row.acceptance_rate:.0%}",
        f"{row.ratio:.2f}",
        NOTHING if tokens is None else f"{tokens / 1e6:.2f}M tokens" if tokens else "0",
        NOTHING if minutes is None else f"{minutes:.0f}",
    )


def synthetic_table(cells: Iterable[SyntheticCell]) -> list[Cells]:
    """Measured against predicted, by acceptance and K."""
    header = ("model", "drafts", "alpha", "K", "got", "E", "MAT", "K phi", "v", "r", "S", "predicted", "error")
    return [(*header, "by MAT", "error", "S none", "theorem", "equal"), *map(_synthetic, cells)]


def _synthetic(cell: SyntheticCell) -> Cells:
    return (
        cell.model,
        cell.method,
        f"{cell.acceptance:g}",
        str(cell.draft_length),
        f"{cell.acceptance_rate:.3f}",
        f"{cell.expected_tokens:.2f}",
        f"{cell.mean_accepted_tokens:.2f}±{cell.tokens_error:.2f}",
        f"{cell.draft:.2f}",
        f"{cell.verify:.2f}",
        f"{cell.rest:.2f}",
        f"{cell.speedup:.2f}",
        f"{cell.predicted:.2f}",
        f"{cell.error:+.1%}",
        f"{cell.predicted_realised:.2f}",
        f"{cell.error_realised:+.1%}",
        f"{cell.speedup_exact:.2f}",
        f"{cell.theorem:.2f}",
        yes_or_no(cell.equal),
    )


def interval(row: Summary) -> str:
    """The interval of a ratio, where there is one."""
    from specrun.runtime.bench_runs import BASELINE

    if row.ratio_low is None or row.ratio_high is None or row.method == BASELINE:
        return NOTHING
    return f"{row.ratio_low:.2f}-{row.ratio_high:.2f}"


def yes_or_no(equal: bool | None) -> str:
    """Whether texts are equal; a difference stands out."""
    return {True: "yes", False: "NO", None: NOTHING}[equal]


def megabytes(count: int) -> str:
    """Bytes as MB."""
    return f"{count / 1e6:.1f}"


def lines(table: Sequence[Cells]) -> list[str]:
    """A table as lines of text."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def describe(bench: Bench) -> str:
    """A model's facts in a line."""
    facts = [f"{key} {value}" for key, value in bench.model.items() if key not in ("model", "digest", "speculators")]
    if bench.peak_bytes is not None:
        facts.append(f"peak memory {megabytes(bench.peak_bytes)} MB")
    facts += [f"timed from {sitting.started}, load {load(sitting.load_average)}" for sitting in bench.sittings]
    return f"{bench.model['model']}: {', '.join(facts)}"


def load(averages: Sequence[float]) -> str:
    """Load averages, where the system tells them."""
    return " ".join(f"{value:.2f}" for value in averages) or "unknown"
