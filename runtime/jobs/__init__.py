"""Offline jobs: a file of requests becomes a file of answers, and whoever stops in between goes on later.

`lines` reads, `line_request` understands a line, a `worker` computes, `answer_line` forms the answer, `output` and
`journal` keep it, `job_file` says whose output it is, and `run` holds it together.

>>> from pathlib import Path
>>> from specrun.runtime import Engine
>>> from specrun.runtime.jobs import EngineWorker, JobSettings, JsonLines, open_job
>>> with Engine.load("smollm2-135m") as engine, open("in.jsonl", "rb") as stream:   # doctest: +SKIP
...     settings = JobSettings("smollm2-135m", engine.bundle.target_digest, {"max_tokens": 64})
...     with open_job(JsonLines(stream, "in.jsonl"), Path("out.jsonl"), settings) as job:
...         for counts in job.run(EngineWorker(engine)):
...             print(counts.done, counts.total)
"""

from specrun.runtime.jobs.line_request import PARAMETERS, Defaults, LineError, LineRequest, parse_line
from specrun.runtime.jobs.lines import JsonLines, Line, LineStream, Source, read_lines
from specrun.runtime.jobs.output import ORDERS, Order
from specrun.runtime.jobs.run import Job, JobCounts, JobSettings, is_plain, open_job, stream_job
from specrun.runtime.jobs.tables import Table, is_table
from specrun.runtime.jobs.worker import Answer, EngineWorker, Worker

__all__ = [
    "ORDERS",
    "PARAMETERS",
    "Answer",
    "Defaults",
    "EngineWorker",
    "Job",
    "JobCounts",
    "JobSettings",
    "JsonLines",
    "Line",
    "LineError",
    "LineRequest",
    "LineStream",
    "Order",
    "Source",
    "Table",
    "Worker",
    "is_plain",
    "is_table",
    "open_job",
    "parse_line",
    "read_lines",
    "stream_job",
]
