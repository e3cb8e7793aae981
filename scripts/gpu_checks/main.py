"""The command line of `scripts/gpu_check`. It takes nothing but Python's own library until the parts run."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from gpu_checks import packing, wheels
from gpu_checks.context import DRY, FULL, ON_CPU, Context
from gpu_checks.driver import find_gpu
from gpu_checks.errors import CheckError
from gpu_checks.files import write_whole
from gpu_checks.runner import Outcome, Part, Results, run_parts
from gpu_checks.table import lines_of

VERBS: Final = ("run", "collect", "pack", "join")
LIMIT: Final = 460.0  # seconds of all parts: below eight minutes
PARTS: Final = tuple(
    Part(name, title, f"gpu_checks.parts.{name}", seconds)
    for name, title, seconds in (
        ("install", "Wheels", 60.0),
        ("environment", "Versions and hardware", 30.0),
        ("export", "Export", 90.0),
        ("correctness", "Logits against the processor's", 60.0),
        ("exactness", "Exactness and pinned rows", 75.0),
        ("speed", "Tokens a second", 75.0),
        ("big_costs", "v(n) of the big model", 50.0),
        ("synthetic", "S(alpha, K, phi) of the big model", 75.0),
        ("kv_memory", "KV memory of target and draft", 45.0),
        ("costs", "v(n) of the model", 45.0),
        ("batches", "Batch throughput", 60.0),
        ("best_of", "Memory of best-of-N", 30.0),
    )
)


def main(arguments: Sequence[str]) -> int:
    """Run a verb; `run` if none is named. Returns the exit code: 0, 1 for a failure, 130 when interrupted."""
    words = list(arguments)
    if words[:1] not in [[verb] for verb in VERBS] and words[:1] not in (["-h"], ["--help"]):
        words.insert(0, "run")
    given = _parser().parse_args(words)
    try:
        return int(given.call(given))
    except CheckError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # a path that is something else, or cannot be written
        print(f"Error: {error.filename or 'A file'}: {error.strerror or error}: name another place.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _more_than_0(text: str) -> float:
    """A number of an option; ValueError, which argparse words, for one that cannot be."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu_check", description="Checks specrun on one NVIDIA GPU: run (the default), collect, pack or join."
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    run = verbs.add_parser("run", help="run the check; without a verb this one is meant")
    run.add_argument("folder", nargs="?", type=Path, help="holds wheels/ and the model's .gguf file")
    run.add_argument("--dry-run", action="store_true", help="walk every part on the processor with a tiny model")
    run.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    run.add_argument("--output", type=Path, default=Path("gpu_check"), help="folder of the JSON file and the table")
    run.add_argument("--only", metavar="PART,...", help=f"some parts: {', '.join(part.name for part in PARTS)}")
    run.add_argument("--limit", type=_more_than_0, default=LIMIT, help="seconds for everything (default %(default)g)")
    run.add_argument(
        "--patience", type=_more_than_0, default=1.0, help="let each part, and everything, take so many times longer"
    )
    run.add_argument("--threads", type=int, help="processor threads")
    run.add_argument("--work", type=Path, help="keep what is made on the way in this folder, to go on from it")
    run.set_defaults(call=_run)
    collect = verbs.add_parser("collect", help="download what the check needs; the one verb that needs a network")
    collect.add_argument("folder", type=Path)
    version = ".".join(map(str, sys.version_info[:2]))
    collect.add_argument("--python-version", default=version, help="of the machine with the GPU (default %(default)s)")
    collect.add_argument("--without", default="", metavar="NAME,...", help="packages that it has already")
    collect.add_argument(
        "--cuda", action="store_true", help="NVIDIA's libraries too (2 GB), where it has only a driver"
    )
    collect.set_defaults(call=_collect)
    pack = verbs.add_parser("pack", help="split a folder into parts below 60 MB, with their sha256 sums")
    pack.add_argument("folder", type=Path)
    pack.add_argument("--parts", type=Path, required=True, help="a new folder for the parts")
    pack.add_argument(
        "--part-mb", type=_more_than_0, default=packing.PART_BYTES / 1e6, help="most of a part (default %(default)g)"
    )
    pack.set_defaults(call=_pack)
    join = verbs.add_parser("join", help="make the folder again from its parts, checking every sum")
    join.add_argument("folder", type=Path)
    join.add_argument("--parts", type=Path, required=True)
    join.set_defaults(call=_join)
    return parser


def _collect(given: argparse.Namespace) -> int:
    without = [name for name in given.without.split(",") if name]
    names = wheels.collect(given.folder, python_version=given.python_version, without=without, cuda=given.cuda)
    print(f"{given.folder}: {len(names)} wheels and the model's weights")
    return 0


def _pack(given: argparse.Namespace) -> int:
    count = packing.pack(given.folder, given.parts, part_bytes=max(1, int(given.part_mb * 1e6)))
    print(f"{given.parts}: {count} parts and {packing.INDEX}")
    return 0


def _join(given: argparse.Namespace) -> int:
    print(f"{given.folder}: {packing.join(given.parts, given.folder)} files")
    return 0


def _run(given: argparse.Namespace) -> int:
    device = "cpu" if given.dry_run else given.device
    if device == "cuda":
        find_gpu()
    parts = _chosen(given.only)
    with _work_folder(given.work) as work:
        context = _context(given, device, work)
        given.output.mkdir(parents=True, exist_ok=True)
        path = given.output / "gpu_check.json"
        facts = {"started": time.strftime("%Y-%m-%d %H:%M"), "device": device, "dry_run": given.dry_run}
        results, text = Results(path, facts | {"model": context.source.stem}), list[str]()

        def show(outcome: Outcome) -> None:
            lines = lines_of(outcome)
            print("\n".join(lines), flush=True)
            text.extend(lines)
            write_whole(given.output / "gpu_check.txt", "\n".join(text) + "\n")

        with _ends_by_signal():
            good = run_parts(
                parts, context, results, limit=given.limit * given.patience, patience=given.patience, show=show
            )
    bad = [f"{outcome.name} {outcome.status}" for outcome in results.outcomes if outcome.status != "ok"]
    print(f"{path}: {'all parts went well' if good else 'not well: ' + ', '.join(bad)}")
    return 0 if good else 1


def _chosen(only: str | None) -> list[Part]:
    if only is None:
        return list(PARTS)
    names = only.split(",")
    unknown = [name for name in names if name not in [part.name for part in PARTS]]
    if unknown:
        raise CheckError(f"There is no part {unknown[0]!r}: choose from {', '.join(part.name for part in PARTS)}.")
    return [part for part in PARTS if part.name in names]


def _context(given: argparse.Namespace, device: str, work: Path) -> Context:
    wheels.link_checkout(work / "import")
    found: list[Path] = []
    if given.dry_run:
        source, amounts = work / "tiny", DRY
    else:
        if given.folder is None:
            raise CheckError("Give the folder that holds wheels/ and the model's .gguf file, or --dry-run.")
        weights = sorted(given.folder.glob("*.gguf"))
        if len(weights) != 1:
            raise CheckError(
                f"{given.folder} holds {len(weights)} .gguf files: it must hold the model's, and no other."
            )
        packing.check_sums(given.folder)
        source, amounts = weights[0].absolute(), FULL if device == "cuda" else ON_CPU
        found = (
            [path.absolute() for path in sorted((given.folder / "wheels").glob("*.whl"))] if device == "cuda" else []
        )
    return Context(device, given.dry_run, source, work.absolute(), tuple(found), given.threads, amounts)


@contextmanager
def _work_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    folder = Path(tempfile.mkdtemp(prefix="gpu_check."))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _ends_by_signal() -> Iterator[None]:
    """Let SIGTERM, and the end of its terminal, end the check as Ctrl-C does: results written, its folder removed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
