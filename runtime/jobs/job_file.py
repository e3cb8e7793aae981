"""The file beside an output that says whose output it is."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from specrun.models_cache.errors import JobError
from specrun.models_cache.strictjson import StrictJsonError, decode, parse_object
from specrun.runtime.jobs.disk import disk_errors, write_whole

VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class JobFile:
    """What a job is of, and what decides its answers.

    input: the file's name when the job began; sha256: of its bytes (hex); lines: how many are not blank; settings: what
    else changes answers, by name, as JSON gives it; seed: drawn once, see `Defaults`.
    """

    specrun_job: int
    input: str
    sha256: str
    lines: int
    settings: str
    seed: int

    def difference(self, other: JobFile) -> str | None:
        """What is another input or setting in `other`, in words; None if it is the same job."""
        if (self.sha256, self.lines) != (other.sha256, other.lines):
            return f"another input ({self.input}, {self.lines} lines; now {other.input}, {other.lines} lines)"
        before, now = json.loads(self.settings), json.loads(other.settings)
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        if not names:
            return None
        parts = [f"{name} {_shown(before.get(name))}, now {_shown(now.get(name))}" for name in names]
        return f"other settings ({'; '.join(parts)})"


def new_job_file(name: str, sha256: str, lines: int, settings: Mapping[str, Any], seed: int) -> JobFile:
    """The file of a job that begins."""
    return JobFile(VERSION, name, sha256, lines, json.dumps(settings, sort_keys=True), seed)


def load_job_file(path: Path) -> JobFile | None:
    """The job file there; None where there is none. Raises JobError for one that cannot be understood."""
    with disk_errors(path):
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            text = ""
    try:
        record = parse_object(text)
        if record.get("specrun_job") != VERSION:
            raise StrictJsonError(f"its version is not {VERSION}")
        record["settings"] = json.dumps(record.get("settings"))
        found = decode(JobFile, record)
        if not isinstance(json.loads(found.settings), dict):
            raise StrictJsonError("settings must be an object")
    except StrictJsonError as error:
        raise JobError(
            f"{path} is no job file of this version ({error}): name another output, or remove that file and the output"
        ) from error
    job: JobFile = found
    return job


def save_job_file(path: Path, job: JobFile, output: Path) -> None:
    """Write it so that it is on the disk, whole."""
    record = asdict(job) | {"settings": json.loads(job.settings)}
    with disk_errors(output):
        write_whole(path, (json.dumps(record, indent=2) + "\n").encode())


def _shown(value: object) -> str:
    text = "none" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:37]}..."
