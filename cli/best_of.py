"""`specrun best-of`: many samples of one prompt, the best by a score."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specrun.cli.constraints import constraint_options, constraint_values
from specrun.cli.generate import read_prompt
from specrun.cli.interrupt import cancel_on_interrupt
from specrun.cli.main import INTERRUPTED
from specrun.cli.opening import open_engine
from specrun.cli.options import engine_values, request_values, sampled_options
from specrun.cli.output import EXACTNESS, echo_json, end_text, is_terminal, note, progress_line, write_text
from specrun.cli.scores import SCORES_HELP, parse_score
from specrun.models_cache.errors import SpecrunError, UsageError

if TYPE_CHECKING:
    from specrun.runtime import Engine
    from specrun.runtime.best_of import BestOfResult, Candidate
    from specrun.runtime.best_of.labels import Marker, Question
    from specrun.runtime.best_of.report import Labelled
    from specrun.runtime.best_of.run import BestOf, Progress


@click.command("best-of")
@click.argument("prompt", required=False, metavar="[PROMPT|-]")
@click.option("--file", "-f", type=click.Path(exists=True, dir_okay=False), help="Read the prompt from this file.")
@click.option("--n", "samples", type=int, default=16, show_default=True, help="Write so many samples.")
@click.option(
    "--score",
    "score_name",
    default="logprob",
    show_default=True,
    metavar="SCORE",
    help=f"What chooses. {SCORES_HELP}",
)
@click.option("--all", "show_all", is_flag=True, help="Show all samples, best first, each with its score on stderr.")
@click.option(
    "--prune", is_flag=True, help="End samples as soon as they cannot win; for scores that can tell, such as logprob."
)
@click.option("--budget-tokens", type=int, metavar="N", help="End all samples at about N tokens of all together.")
@click.option("--budget-s", type=float, metavar="S", help="End all samples after S seconds.")
@click.option("--answer", metavar="TEXT", help="The right answer: say how likely one of k samples gives it (pass@k).")
@click.option(
    "--labels",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Instead of a prompt, JSON lines with prompt and answer: report how often the best is right, beside pass@n.",
)
@sampled_options
@constraint_options
@click.option("--raw", is_flag=True, help="Continue the prompt as it is, without the chat template.")
@click.option("--stats", is_flag=True, help="Print a second line of figures to stderr: speed, MAT, acceptance, prompt.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; with --all it lists the samples.")
def best_of(
    prompt: str | None,
    file: str | None,
    samples: int,
    score_name: str,
    show_all: bool,
    prune: bool,
    budget_tokens: int | None,
    budget_s: float | None,
    answer: str | None,
    labels: str | None,
    raw: bool,
    system: str | None,
    stats: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Write many samples of an answer to PROMPT and print the best one.

    The prompt is read once, and its keys and values are stored once for all samples, which are decoded together and
    draft by --method; n-grams are copied from all samples' texts. A line on stderr says which sample won, by what
    score, and how much memory the keys and values took, against as many copies of the prompt.

    With the same --seed a sample's text is the same whatever --n, --method and -k; it is that of plain decoding of the
    model's shared-prompt graph, which rounds a little differently from the graph of `generate`. Samples that --prune
    ends are "cancelled", those that a budget ends have the finish reason "length".

    A model that was exported by an older specrun lacks that graph: export or pull it again with --force. Models for a
    GPU, and those with a sliding window, have none: their rows copy the prompt, and samples are those of generate --n.

    \b
    Examples:
      specrun best-of "Write a haiku about tides."
      specrun best-of --n 8 --all --max-tokens 100 "Explain why the sky is blue."
      specrun best-of --score certainty --temperature 1 "What is 17 * 23?"
      specrun best-of --n 32 --prune --budget-s 10 --file question.txt
      specrun best-of --json --all "Name a river." | jq '.candidates[].score'
      specrun best-of --score vote --labels questions.jsonl
    """
    from specrun.runtime.best_of.answers import normalise
    from specrun.runtime.best_of.labels import Marker, read_questions
    from specrun.runtime.best_of.run import BestOf

    if labels is not None and (show_all or stats or any(one is not None for one in (prompt, file, answer))):
        raise UsageError("--labels brings the prompts: leave PROMPT, --file, --answer, --all and --stats out.")
    score = parse_score(score_name, threads=values["threads"])
    own: Any = {"n": samples, "score": score, "prune": prune, "budget_tokens": budget_tokens, "budget_s": budget_s}
    options: Any = {**request_values(values), **constraint_values(values), "system": system, "raw": raw}
    if labels is not None:
        marker, questions = Marker(score), read_questions(Path(labels))
        for question in questions:
            marker.require_findable(question.answer)
        with open_engine(**engine_values(values), methods=(values["method"],)) as engine:
            _report(engine, questions, marker, options, own, as_json=as_json)
        return
    right = None
    if answer is not None:
        marker = Marker(score)
        marker.require_findable(normalise(answer))
        right = marker.right(normalise(answer))
    text = read_prompt(prompt, file, "best-of")
    with open_engine(**engine_values(values), methods=(values["method"],)) as engine, progress_line() as line:

        def show(progress: Progress) -> None:
            label = f"{progress.done} of {progress.samples} samples done, {progress.tokens} tokens"
            line.on_terminal(label, 0, None)

        run = BestOf(
            engine,
            text,
            options,
            **own,
            right=right,
            progress=show if is_terminal(sys.stderr) else None,
        )
        with cancel_on_interrupt(_Ending(run)) as interrupt:
            result = run.run()
    if as_json:
        echo_json(result.to_json(candidates=show_all))
    else:
        _show(result, show_all)
    note(_summary(result))
    if result.pass_at_k is not None:
        note(", ".join(f"pass@{k} {chance:.1%}" for k, chance in result.pass_at_k.items()))
    for said in getattr(score, "notes", ()):
        note(said)
    if stats:
        note(_stats(result))
    if interrupt.came:
        raise click.exceptions.Exit(INTERRUPTED)
    if result.winner is None:
        raise click.exceptions.Exit(1)


def _report(
    engine: Engine, questions: list[Question], marker: Marker, options: Any, own: dict[str, Any], *, as_json: bool
) -> None:
    """Samples for each question of a file, and what choosing among them is worth."""
    from specrun.runtime.best_of.report import report
    from specrun.runtime.best_of.run import BestOf

    done: list[Labelled] = []
    interrupted, failure, cut, pruned = False, None, 0, 0
    with progress_line() as line:
        for number, question in enumerate(questions, 1):
            line(f"Question {number} of {len(questions)}", 0, None)
            try:
                run = BestOf(engine, question.prompt, options, **own)
                with cancel_on_interrupt(_Ending(run)) as interrupt:
                    result = run.run()
                interrupted = interrupt.came
            except KeyboardInterrupt:  # while it was scoring
                interrupted = True
            except SpecrunError as error:
                failure = type(error)(f"question {number}: {error}")
            if interrupted or failure is not None:
                break
            cut, pruned = cut + len(result.cut), pruned + len(result.pruned)
            done.append(marker.labelled(result, question.answer))
    settings = {"model": engine.bundle.manifest.name, "score": own["score"].name, **_given(options)}
    if done:
        found = report(done)
        echo_json(settings | found.to_json()) if as_json else click.echo(found.table())
    note(", ".join(f"{name} {value}" for name, value in settings.items()))
    if cut or pruned:
        note(f"{cut} samples were cut by the budget and {pruned} pruned: they count with what they had")
    if failure is not None:
        raise failure
    if interrupted:
        note(f"interrupted: {len(done)} of {len(questions)} questions are done")
        raise click.exceptions.Exit(INTERRUPTED)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """What the user chose of how samples are drawn."""
    names = ("seed", "max_tokens", "temperature")
    return {name: options[name] for name in names if options.get(name) is not None}


class _Ending:
    """What Ctrl-C does: samples that are being decoded end where they are; scores are not waited for."""

    def __init__(self, run: BestOf) -> None:
        self._run = run

    def cancel(self) -> None:
        if self._run.scoring:
            raise KeyboardInterrupt
        self._run.cancel()


def _show(result: BestOfResult, show_all: bool) -> None:
    if not show_all:
        write_text(result.text)
        end_text(result.text)
        return
    for candidate in result.ranked():
        note(f"--- sample {_described(result, candidate)} ---")
        write_text(candidate.text)
        end_text(candidate.text)


def _described(result: BestOfResult, candidate: Candidate) -> str:
    ended = {"length": ", cut", "cancelled": ", pruned" if candidate.index in result.pruned else ", cancelled"}
    return (
        f"{candidate.index} ({result.score} {result.scores[candidate.index]:.4g}, {len(candidate.token_ids)} tokens"
        f"{ended.get(candidate.finish_reason, '')})"
    )


def _summary(result: BestOfResult) -> str:
    memory = result.memory
    if not result.candidates:
        return "interrupted before the first sample"
    won = f"no sample of {len(result.candidates)} can be chosen by {result.score}"
    if result.winner is not None:
        won = f"sample {_described(result, result.winner)} of {len(result.candidates)}"
    held = memory.kv_prefix_bytes + memory.kv_rows_bytes
    if not memory.kv_prefix_bytes:
        return f"{won}; keys and values {held / 1e6:.1f} MB, with the prompt in every row"
    if held >= memory.kv_copied_bytes:  # one row saves nothing
        return f"{won}; keys and values {held / 1e6:.1f} MB"
    return (
        f"{won}; keys and values {held / 1e6:.1f} MB instead of {memory.kv_copied_bytes / 1e6:.1f} MB "
        f"({memory.kv_saved:.1%} less)"
    )


def _stats(result: BestOfResult) -> str:
    counts, timings, usage = result.speculation, result.timings, result.usage
    rate = usage.completion_tokens / timings.decode_s if timings.decode_s else 0.0
    parts = [
        f"{usage.completion_tokens} tokens",
        f"{rate:.1f} tokens/s",
        f"prompt of {usage.prompt_tokens} tokens read in {timings.prefill_s:.2f} s ({usage.cached_tokens} cached)",
        f"{result.rounds} runs",
        f"MAT {counts.mean_accepted_tokens:.2f}",
        f"acceptance {counts.acceptance_rate:.0%} ({counts.accepted} of {counts.evaluated})",
        f"method {result.method}",
        f"{EXACTNESS[result.exactness]} of this graph",
    ]
    if result.seed is not None:
        parts.append(f"seed {result.seed}")
    return ", ".join(parts)
