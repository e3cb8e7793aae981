"""The command: options, what is prepared and in which order, and what is printed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specrun.export.bundle import export_bundle
from specrun.models_cache import Bundle, SpecrunError, fetch_source, find_bundle
from specrun.models_cache.errors import ModelNotFoundError
from specrun.models_cache.sources import FetchedSource
from specrun.runtime.backend import default_threads
from specrun.runtime.bench import BenchPrompt, load_prompts
from specrun.runtime.verify import PROMPTS

from .fidelity import measure_agreement, references
from .processes import BenchError, Worker
from .runs import Alternation, Question, Record
from .sides import PEERS, SPECRUN, Place, Side, choice, peer_modes, peer_side, specrun_modes, specrun_side
from .table import MAX_IDLE_LOAD, as_json, format_table, idle_loads, rows

DEFAULT_WORK = Path(__file__).resolve().parents[3] / ".cache" / "peers"
MAX_LOAD = 0.5  # of the machine's one-minute load average at the start
SPARE_POSITIONS = 64  # for drafts past the end of a text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    options = _options(arguments)
    try:
        report = compare(options)
    except KeyboardInterrupt:
        return 130
    except (BenchError, SpecrunError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare all sides, time them in turn, and return what `--json` prints."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    choices = [choice(name) for name in dict.fromkeys(options.peers)]
    modes = specrun_modes(options.methods)
    prompts = _prompts(options.prompts, options.limit)
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work.resolve()
    bundle = _bundle(options.model)
    source = _source(bundle, options)
    reference = _reference(source, options)
    record = Record(options.output, _settings(options, bundle, reference, prompts))
    place = Place(work, source, options.genai_options, _note)
    with ExitStack() as stack:
        specrun = specrun_side(bundle, options.threads)
        workers = {SPECRUN: stack.enter_context(_running(specrun, work))}
        questions = _questions(workers[SPECRUN], prompts, options.max_tokens)
        if reference is not None:
            fp32 = specrun_side(reference, options.threads, "specrun fp32")
            references(lambda: fp32.start(work), questions, options.max_tokens, record)
        sides, failures = [specrun], {}
        context = max(len(question.ids) for question in questions) + options.max_tokens + SPARE_POSITIONS
        for chosen in choices:
            try:
                side = peer_side(chosen, place, options.threads, context)
                workers[side.label] = stack.enter_context(_running(side, work))
            except BenchError as error:
                failures[chosen.label] = str(error)
                _note(f"{chosen.label} is left out: {error}")
                continue
            sides.append(side)
            modes += peer_modes(chosen, options.draft_lengths)
        about = _about(sides, workers, record)
        _note(f"Timing {len(modes)} modes on {len(questions)} prompts, {options.repeats} times each ...")
        alternation = Alternation(workers, modes, record)
        alternation.run(questions, options.repeats, options.max_tokens, _progress)
        failures |= alternation.failures
        if reference is not None:
            failures |= measure_agreement(workers, questions, options.positions, record, _progress)
    table = rows([mode for mode in modes if mode.label not in failures], record)
    return {
        "environment": _settings(options, bundle, reference, prompts) | {"repeats": options.repeats, "load": load},
        "sides": about,
        "failures": failures,
        "modes": as_json(table),
        "table": format_table(table),
        "idle_load": idle_loads(record.runs),
        "runs": [asdict(run) for run in record.runs],
    }


@contextmanager
def _running(side: Side, work: Path) -> Iterator[Worker]:
    worker = side.start(work)
    try:
        yield worker
    finally:
        worker.close()


def _about(sides: Sequence[Side], workers: dict[str, Worker], record: Record) -> dict[str, Any]:
    """Version and weights by side. Raises BenchError if earlier runs of the record were made with others."""
    about = {}
    for side in sides:
        now = {"version": workers[side.label].ask("about")["version"], "weights": side.weights}
        before = record.facts.get(("side", side.label))
        if before is None:
            record.add_fact("side", side.label, now)
        elif before != now:
            raise BenchError(f"--output holds runs of {side.label} as {before}, but it is now {now}: choose another")
        about[side.label] = now
    return about


def _settings(
    options: argparse.Namespace, bundle: Bundle, reference: Bundle | None, prompts: Sequence[BenchPrompt]
) -> dict[str, Any]:
    return {
        "model": bundle.manifest.name,
        "digest": bundle.digest,
        "reference": reference.digest if reference is not None else None,
        "threads": options.threads,
        "max_tokens": options.max_tokens,
        "positions": options.positions,
        "prompts": [prompt.id for prompt in prompts],
        "prompts_digest": hashlib.sha256(json.dumps([prompt.prompt for prompt in prompts]).encode()).hexdigest()[:16],
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def _questions(worker: Worker, prompts: Sequence[BenchPrompt], max_tokens: int) -> list[Question]:
    questions = []
    for prompt in prompts:
        encoded = worker.ask("encode", prompt=prompt.prompt)
        ids = encoded["prompt_ids"]
        if len(ids) + max_tokens > encoded["context"]:
            raise BenchError(
                f"prompt {prompt.id} has {len(ids)} tokens and the context holds {encoded['context']}: "
                "leave it out or lower --max-tokens"
            )
        questions.append(Question(prompt.id, prompt.prompt, ids))
    return questions


def _prompts(path: Path | None, limit: int) -> list[BenchPrompt]:
    """`limit` prompts spread evenly over the file, under ids that are all different."""
    if path is None:
        prompts = [BenchPrompt(str(number), "built-in", text) for number, text in enumerate(PROMPTS, 1)]
    else:
        prompts = load_prompts(path)
    if len(prompts) > limit:
        prompts = [prompts[number * len(prompts) // limit] for number in range(limit)]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise BenchError(f"{path} gives the same id to several prompts: make them differ")
    return prompts


def _bundle(name: str) -> Bundle:
    try:
        return find_bundle(name)
    except ModelNotFoundError:
        _note(f"Exporting {name} ...")
        return export_bundle(name)


def _source(bundle: Bundle, options: argparse.Namespace) -> FetchedSource:
    """The weights that the bundle was made of."""
    made = bundle.manifest.source
    name = options.source or (options.model if made.kind == "path" else made.name)
    try:
        source = fetch_source(name)
    except ModelNotFoundError as error:
        raise BenchError(f"{bundle.manifest.name} was made of {made.name}: give where that is with --source") from error
    if set(source.files.values()) != set(made.files.values()):
        raise BenchError(f"{bundle.manifest.name} was made from other weights than {source.name}: give its --source")
    return source


def _reference(source: FetchedSource, options: argparse.Namespace) -> Bundle | None:
    """The fp32 bundle of the same weights, exported where it is missing."""
    if options.reference == "none":
        return None
    if options.reference:
        bundle = find_bundle(options.reference)
    else:
        name = os.fspath(source.path) if source.kind == "path" else source.name
        _note(f"Looking for the fp32 bundle of {source.name}, or exporting it ...")
        bundle = export_bundle(name, precision="fp32")
    if set(bundle.manifest.source.files.values()) != set(source.files.values()):
        raise BenchError(f"{bundle.manifest.name} was made from other weights: give another --reference")
    return bundle


def _text(report: dict[str, Any]) -> str:
    environment = report["environment"]
    lines = [
        f"{environment['model']}, greedy; threads {environment['threads']}, tokens {environment['max_tokens']}, "
        f"prompts {len(environment['prompts'])}, repeats {environment['repeats']}",
        *(f"  {side}: {about['version']}; weights: {about['weights']}" for side, about in report["sides"].items()),
        "",
        report["table"],
        *(f"{label} was not measured: {reason}" for label, reason in report["failures"].items()),
    ]
    if environment["load"] > MAX_LOAD:
        lines.append(f"Warning: the machine was busy before the start (load {environment['load']:.1f}).")
    for side, load in report["idle_load"].items():
        if load > MAX_IDLE_LOAD:
            lines.append(f"Warning: {side} used {load:.0%} of a core while it waited: do not trust the figures.")
    return "\n".join(lines)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = ",".join(peer.name for peer in PEERS)
    parser = argparse.ArgumentParser(
        prog="python tests/bench/peers", description="Time specrun and other runtimes in turn on the same weights."
    )
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="a bundle (default: %(default)s)")
    add("--source", help="where the bundle's weights are, if its name does not say")
    add(
        "--peers",
        type=_list,
        default=names,
        metavar="NAME,...",
        help="or NAME:WEIGHTS, as in genai:int4 (%(default)s)",
    )
    add("--methods", type=_list, default="ngram", metavar="METHOD,...", help="specrun's, or as ngram:4 (%(default)s)")
    add("--draft-lengths", type=_lengths, default="2,4", metavar="K,...", help="of the peers' drafts (%(default)s)")
    add("--prompts", type=Path, metavar="FILE.jsonl", help="prompts, as for specrun bench (default: four short ones)")
    add("--limit", type=_count, default=8, help="so many prompts, spread over the file (default: %(default)s)")
    add("--max-tokens", type=_count, default=160, help="tokens of each text (default: %(default)s)")
    add("--repeats", type=_count, default=3, help="runs of each (default: %(default)s)")
    add("--threads", type=_count, default=default_threads(), help="of every side (default: %(default)s)")
    add("--reference", metavar="BUNDLE", help="the yardstick of fidelity, or none (default: an fp32 export)")
    add("--positions", type=_count, default=40, help="of each fp32 text, for the next token (default: %(default)s)")
    add("--genai-options", nargs="+", default=[], metavar="KEY=VALUE", help="of its builder: fuse_mlp_gate_up=true")
    add("--work", type=Path, default=DEFAULT_WORK, metavar="DIR", help="for environments and weights (.cache/peers)")
    add("--output", type=Path, metavar="FILE.jsonl", help="keep the runs there, and go on from those it holds")
    add("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.max_tokens < 2:
        parser.error("--max-tokens must be 2 or more: decoding is timed from the first token on")
    return options


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _lengths(text: str) -> list[int]:
    return [_count(part) for part in _list(text)]
