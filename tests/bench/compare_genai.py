"""Times plain decoding of specrun against onnxruntime-genai: same weights, prompts, threads and number of tokens.

Each side is a process of its own that sleeps while the other works; they take turns prompt by prompt. README.md says
what is measured. Run it as `python tests/bench/compare_genai.py` in an environment with specrun, on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from genai_model import BUILD_OPTIONS, genai_model, genai_python
from worker import BenchError, Worker

from specrun.export.bundle import export_bundle
from specrun.models_cache import Bundle, SpecrunError, fetch_source, find_bundle
from specrun.models_cache.errors import ModelNotFoundError
from specrun.runtime.backend import default_threads
from specrun.runtime.bench import BenchPrompt, load_prompts
from specrun.runtime.kv_cache import shared_prefix
from specrun.runtime.verify import PROMPTS

HERE = Path(__file__).resolve().parent
DEFAULT_WORK = HERE.parents[1] / ".cache" / "bench-genai"
SETTLE_S = 0.05  # threads of the process that just answered stop spinning meanwhile
WARM_UP_TOKENS = 16
MAX_IDLE_LOAD = 0.05


@dataclass(frozen=True, slots=True)
class Method:
    """A side and its method. `reference`: the method of the same side whose text it is expected to keep."""

    side: str
    name: str
    label: str
    reference: str


EXACT = Method("specrun", "none", "specrun exact", "specrun exact")
BASELINE = Method("specrun", "baseline", "specrun baseline", "specrun exact")
GENAI = Method("genai", "none", "genai", "genai")
PLAIN = (EXACT, BASELINE, GENAI)
NGRAM = (Method("specrun", "ngram", "specrun ngram", EXACT.label), Method("genai", "ngram", "genai ngram", GENAI.label))


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run. decode_s: seconds from the first token to the last.

    waiting_s, waiting_cpu_s: how long the other side waited meanwhile, and its processor seconds in that time.
    """

    prompt: str
    method: str
    repeat: int
    prompt_tokens: int
    tokens: int
    decode_s: float
    waiting_s: float
    waiting_cpu_s: float
    token_ids: tuple[int, ...]

    @property
    def seconds_per_token(self) -> float:
        return self.decode_s / (self.tokens - 1)


@dataclass(frozen=True, slots=True)
class Row:
    """A method over all prompts. ratio: its tokens/s over genai's, the median of the prompts' medians over repeats.

    same_text: on how many prompts every run wrote the text of its own side's plain decoding ("specrun exact", "genai").
    """

    method: str
    tokens_per_s: float
    ratio: float
    prompts: int
    same_text: int


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        report = compare(options)
    except KeyboardInterrupt:
        return 130
    except (BenchError, SpecrunError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)
    return 0


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Prepare both sides, time them in turn, and return what `--json` prints."""
    prompts = _prompts(options.prompts, options.limit)
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work.resolve()
    bundle = _bundle(options.model)
    source = fetch_source(options.source or options.model)
    if set(source.files.values()) != set(bundle.manifest.source.files.values()):
        raise BenchError(f"{bundle.manifest.name} was made from other weights than {source.name}: give its --source.")
    python = genai_python(work, _note)
    model = genai_model(work, python, source, options.genai_options, _note)
    methods = (*PLAIN, *NGRAM) if options.ngram else PLAIN
    threads = str(options.threads)
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for side, interpreter, folder in (("specrun", Path(sys.executable), bundle.path), ("genai", python, model)):
            arguments = [os.fspath(folder), threads]
            worker = Worker(interpreter, HERE / f"worker_{side}.py", arguments, work / f"worker_{side}.log")
            workers[side] = worker
            stack.callback(worker.close)
            worker.ask("about")  # it has loaded its model before the other one starts
        about = {side: worker.ask("about") for side, worker in workers.items()}
        runs = list(_runs(workers, prompts, methods, options))
    waiting = {side: [run for run in runs if not run.method.startswith(side)] for side in workers}
    rows = [_row(method, runs) for method in methods]
    first = {label: _texts(runs, label) for label in (EXACT.label, GENAI.label)}
    equal = [shared_prefix(first[EXACT.label][prompt][0], first[GENAI.label][prompt][0]) for prompt in first["genai"]]
    return {
        "environment": {
            "model": bundle.manifest.name,
            "digest": bundle.digest,
            "specrun_onnxruntime": about["specrun"]["onnxruntime"],
            "specrun_exactness": about["specrun"]["exactness"],
            "genai": about["genai"]["onnxruntime-genai"],
            "genai_onnxruntime": about["genai"]["onnxruntime"],
            "genai_build": ["precision=int8", *BUILD_OPTIONS, *options.genai_options],
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": options.threads,
            "max_tokens": options.max_tokens,
            "repeats": options.repeats,
            "ngram_draft_length": options.ngram or None,
        },
        "methods": [asdict(row) for row in rows],
        "exact_to_genai": rows[0].ratio,
        "baseline_to_genai": rows[1].ratio,
        "idle_load": {
            side: sum(run.waiting_cpu_s for run in during) / sum(run.waiting_s for run in during)
            for side, during in waiting.items()
        },
        "equal_leading_tokens": statistics.median(equal),
        "runs": [asdict(run) for run in runs],
    }


def _runs(
    workers: dict[str, Worker], prompts: Sequence[BenchPrompt], methods: Sequence[Method], options: argparse.Namespace
) -> Iterator[Run]:
    """Methods alternate within a prompt; which one comes first turns from repeat to repeat and prompt to prompt."""
    for method in methods:
        _run(workers, prompts[0], method, -1, options, WARM_UP_TOKENS)
    total = len(prompts) * options.repeats * len(methods)
    done = 0
    for number, prompt in enumerate(prompts):
        for repeat in range(options.repeats):
            shift = (number + repeat) % len(methods)
            for method in (*methods[shift:], *methods[:shift]):
                done += 1
                _progress(f"run {done} of {total}: prompt {prompt.id}, {method.label}")
                yield _run(workers, prompt, method, repeat, options, options.max_tokens)
    _progress("")


def _run(
    workers: dict[str, Worker],
    prompt: BenchPrompt,
    method: Method,
    repeat: int,
    options: argparse.Namespace,
    max_tokens: int,
) -> Run:
    encoded = workers["specrun"].ask("encode", prompt=prompt.prompt)
    prompt_ids = encoded["prompt_ids"]
    if len(prompt_ids) + options.max_tokens > encoded["context"]:
        raise BenchError(
            f"Prompt {prompt.id} has {len(prompt_ids)} tokens and the context holds {encoded['context']}: "
            "leave it out or lower --max-tokens."
        )
    request: dict[str, Any] = {"method": method.name, "prompt_ids": prompt_ids, "max_tokens": max_tokens}
    if method.side == "specrun":
        request["prompt"] = prompt.prompt
    elif method.name == "ngram":
        request["draft_length"] = options.ngram
    time.sleep(SETTLE_S)
    (other,) = (worker for side, worker in workers.items() if side != method.side)
    before = other.ask("about")
    answer = workers[method.side].ask("run", **request)
    after = other.ask("about")
    tokens = len(answer["token_ids"])
    if tokens < 2:
        raise BenchError(f"{method.label} wrote {tokens} tokens for prompt {prompt.id}: leave this prompt out.")
    return Run(
        prompt=prompt.id,
        method=method.label,
        repeat=repeat,
        prompt_tokens=len(prompt_ids),
        tokens=tokens,
        decode_s=answer["decode_s"],
        waiting_s=after["idle_s"] - before["idle_s"],
        waiting_cpu_s=after["idle_cpu_s"] - before["idle_cpu_s"],
        token_ids=tuple(answer["token_ids"]),
    )


def _row(method: Method, runs: Sequence[Run]) -> Row:
    own = {(run.prompt, run.repeat): run for run in runs if run.method == method.label}
    reference = {(run.prompt, run.repeat): run for run in runs if run.method == GENAI.label}
    prompts = [*dict.fromkeys(prompt for prompt, _ in own)]
    repeats = {prompt: [repeat for name, repeat in own if name == prompt] for prompt in prompts}
    speeds = [
        statistics.median(1 / own[prompt, repeat].seconds_per_token for repeat in repeats[prompt]) for prompt in prompts
    ]
    ratios = [
        statistics.median(
            reference[prompt, repeat].seconds_per_token / own[prompt, repeat].seconds_per_token
            for repeat in repeats[prompt]
        )
        for prompt in prompts
    ]
    expected, texts = _texts(runs, method.reference), _texts(runs, method.label)
    return Row(
        method=method.label,
        tokens_per_s=statistics.median(speeds),
        ratio=statistics.median(ratios),
        prompts=len(prompts),
        same_text=sum(all(text == expected[prompt][0] for text in texts[prompt]) for prompt in prompts),
    )


def _texts(runs: Sequence[Run], label: str) -> dict[str, list[tuple[int, ...]]]:
    texts: dict[str, list[tuple[int, ...]]] = {}
    for run in runs:
        if run.method == label:
            texts.setdefault(run.prompt, []).append(run.token_ids)
    return texts


def _prompts(path: Path | None, limit: int) -> list[BenchPrompt]:
    """`limit` prompts spread evenly over the file, under ids that are all different."""
    if path is None:
        prompts = [BenchPrompt(str(number), "built-in", text) for number, text in enumerate(PROMPTS, 1)]
    else:
        prompts = load_prompts(path)
    if len(prompts) > limit:
        prompts = [prompts[number * len(prompts) // limit] for number in range(limit)]
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise BenchError(f"{path} gives the same id to several prompts: make them differ.")
    return prompts


def _bundle(name: str) -> Bundle:
    try:
        bundle = find_bundle(name)
    except ModelNotFoundError:
        _note(f"Exporting {name} ...")
        bundle = export_bundle(name)
    precision = bundle.manifest.precision.get("requested")
    if precision != "int8":
        raise BenchError(f"{bundle.manifest.name} is {precision}, and 8-bit models are compared: export it as int8.")
    return bundle


def _print_table(report: dict[str, Any]) -> None:
    environment = report["environment"]
    print(
        f"{environment['model']}, 8-bit, {environment['threads']} threads, {environment['max_tokens']} tokens, "
        f"{environment['repeats']} repeats; specrun on onnxruntime {environment['specrun_onnxruntime']}, "
        f"exactness {environment['specrun_exactness']}; onnxruntime-genai {environment['genai']} on onnxruntime "
        f"{environment['genai_onnxruntime']}, built with {' '.join(environment['genai_build'])}"
    )
    print(f"{'method':<18}{'tokens/s':>9}{'ratio':>8}  text kept")
    for row in report["methods"]:
        kept = f"{row['same_text']} of {row['prompts']}"
        print(f"{row['method']:<18}{row['tokens_per_s']:>9.1f}{row['ratio']:>8.3f}  {kept}")
    print(f"ratio specrun exact / genai {report['exact_to_genai']:.3f}, ", end="")
    print(f"baseline / genai {report['baseline_to_genai']:.3f}")
    print(f"specrun and genai agree on the first {report['equal_leading_tokens']:.0f} tokens (median)")
    for side, load in report["idle_load"].items():
        if load > MAX_IDLE_LOAD:
            print(f"Warning: {side} used {load:.0%} of a core while it waited: the figures are not to be trusted.")


def _note(text: str) -> None:
    print(text, file=sys.stderr)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time plain decoding of specrun against onnxruntime-genai.")
    parser.add_argument("--model", default="smollm2-135m", help="an 8-bit bundle (default: %(default)s)")
    parser.add_argument("--source", help="where the bundle's weights come from, if not from the name of the model")
    parser.add_argument("--prompts", type=Path, metavar="FILE.jsonl", help="prompts, as for specrun bench")
    parser.add_argument("--limit", type=_count, default=8, help="so many prompts, spread over the file (%(default)s)")
    parser.add_argument("--max-tokens", type=_count, default=160, help="tokens of each text (default: %(default)s)")
    parser.add_argument("--repeats", type=_count, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=_count, default=default_threads(), help="of both (default: %(default)s)")
    parser.add_argument(
        "--ngram",
        type=int,
        choices=range(1, 17),
        metavar="K",
        help="also time n-gram speculation: genai's with K draft tokens, specrun's with the length it chooses",
    )
    parser.add_argument(
        "--genai-options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="more options for its model builder, such as fuse_mlp_gate_up=true",
    )
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK, metavar="DIR", help="for its environment and model")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if options.max_tokens < 2:
        parser.error("--max-tokens must be 2 or more: decoding is timed from the first token on")
    return options


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
