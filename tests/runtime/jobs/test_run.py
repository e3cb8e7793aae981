"""Jobs with a worker whose answers are known: order, resuming, and whose output it is."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from specrun.models_cache.errors import JobError
from specrun.runtime.jobs import Answer, JsonLines, LineRequest, LineStream, Order, open_job, stream_job

from .fake_worker import IN_FLIGHT, FakeWorker, records, run_job, settings, write_prompts

ORDERS: tuple[Order, ...] = ("input", "completion")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "in.jsonl", 40)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


class Stops(FakeWorker):
    """Raises after so many answers."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self._after = after

    def answers(self, requests: Iterable[LineRequest]) -> Iterator[Answer]:
        for count, answer in enumerate(super().answers(requests)):
            if count == self._after:
                raise KeyboardInterrupt
            yield answer


class TestAnswers:
    @pytest.mark.parametrize("order", ORDERS)
    def test_every_line_has_one_answer(self, source: Path, target: Path, order: Order) -> None:
        counts = run_job(source, target, settings(order))
        found = records(target)
        assert sorted(record["id"] for record in found) == sorted(f"line-{number}" for number in range(1, 41))
        for record in found:
            number = int(record["id"][5:])
            assert set(record) == {"id", "custom_id", "response", "error"}
            if number % 6 == 5:
                assert record["custom_id"] is None
                assert record["error"]["code"] == "not_an_object"
            elif number % 7 == 3:
                assert record["error"] == {"code": "failed", "message": "It was told to fail."}
                assert (record["custom_id"], record["response"]) == (number, None)
            else:
                assert record["error"] is None
                assert record["custom_id"] == number
                assert record["response"]["status_code"] == 200
                assert record["response"]["request_id"] == record["id"]
                assert record["response"]["body"]["text"] == f"prompt {number % 5}!"
        failed = sum(record["error"] is not None for record in found)
        assert (counts.total, counts.done, counts.failed, counts.before) == (40, 40, failed, 0)
        assert counts.tokens == 3 * (40 - failed)

    def test_order(self, source: Path, target: Path) -> None:
        run_job(source, target, settings("input"))
        assert [record["id"] for record in records(target)] == [f"line-{number}" for number in range(1, 41)]
        other = target.with_name("other.jsonl")
        run_job(source, other, settings("completion"))
        assert [record["id"] for record in records(other)] != [record["id"] for record in records(target)]

    def test_no_reader_can_take_an_answer_for_two_lines(self, source: Path, target: Path) -> None:
        source.write_text('{"prompt": "a\u2028b\\nc\u0085"}\n', encoding="utf-8")
        run_job(source, target, settings())
        text = target.read_text(encoding="utf-8")
        assert len(text.splitlines()) == 1
        assert json.loads(text)["response"]["body"]["text"] == "a\u2028b\nc\u0085!"

    def test_duplicates_of_a_prompt_and_of_an_id_are_lines_of_their_own(self, source: Path, target: Path) -> None:
        source.write_text('{"id": "x", "prompt": "a"}\n' * 3)
        run_job(source, target, settings())
        assert [(record["id"], record["custom_id"]) for record in records(target)] == [
            (f"line-{number}", "x") for number in (1, 2, 3)
        ]

    @pytest.mark.parametrize("order", ORDERS)
    def test_an_input_without_lines(self, source: Path, target: Path, order: Order) -> None:
        source.write_bytes(b"\n\n")
        assert run_job(source, target, settings(order)).done == 0
        assert target.read_bytes() == b""
        assert run_job(source, target, settings(order)).done == 0

    def test_blank_lines_do_not_hold_up_the_order(self, source: Path, target: Path) -> None:
        source.write_text("\n" + '{"prompt": "a"}\n\n' * 9)
        worker = Stops(5)
        with pytest.raises(KeyboardInterrupt):
            run_job(source, target, settings(), worker)
        run_job(source, target, settings())
        assert [record["id"] for record in records(target)] == [f"line-{number}" for number in range(2, 20, 2)]

    @pytest.mark.parametrize("order", ORDERS)
    def test_to_a_stream(self, source: Path, order: Order) -> None:
        stream = io.BytesIO()
        lines = LineStream(io.BytesIO(source.read_bytes()), "stdin")
        with stream_job(lines, stream, settings(order)) as job:
            for _ in job.run(FakeWorker()):
                continue
        found = [json.loads(line)["id"] for line in stream.getvalue().splitlines()]
        wanted = [f"line-{number}" for number in range(1, 41)]
        assert sorted(found) == sorted(wanted)
        assert (found == wanted) == (order == "input")
        assert (job.counts.total, job.counts.done) == (40, 40)

    def test_a_stream_is_read_as_it_is_needed(self) -> None:
        class Endless(io.RawIOBase):
            def readable(self) -> bool:
                return True

            def readline(self, size: int | None = -1) -> bytes:
                return b'{"prompt": "a"}\n'

        stream = io.BytesIO()
        with (
            stream_job(LineStream(Endless(), "endless"), stream, settings()) as job,  # type: ignore[arg-type]
            closing(job.run(FakeWorker())) as steps,
        ):
            for _ in range(20):
                next(steps)
        assert 10 < stream.getvalue().count(b"\n") <= 20


class TestResuming:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("after", [0, 1, 5, 17, 26])
    def test_stopped_and_started_again(self, source: Path, target: Path, order: Order, after: int) -> None:
        whole = target.with_name("whole.jsonl")
        run_job(source, whole, settings(order))
        first, second = Stops(after), FakeWorker()
        with pytest.raises(KeyboardInterrupt):
            run_job(source, target, settings(order), first)
        counts = run_job(source, target, settings(order), second)
        assert counts.before >= after
        assert counts.done == 40
        assert sorted(records(target), key=str) == sorted(records(whole), key=str)
        if order == "input":
            assert target.read_bytes() == whole.read_bytes()
        assert len(set(first.numbers) & set(second.numbers)) <= IN_FLIGHT
        assert not target.with_name("out.jsonl.job.early").exists()

    @pytest.mark.parametrize("order", ORDERS)
    def test_a_finished_job_computes_nothing(self, source: Path, target: Path, order: Order) -> None:
        run_job(source, target, settings(order))
        before = target.read_bytes()
        worker = FakeWorker()
        counts = run_job(source, target, settings(order), worker)
        assert worker.numbers == []
        assert (counts.before, counts.done) == (40, 40)
        assert counts.failed == sum(record["error"] is not None for record in records(target))
        assert target.read_bytes() == before

    @pytest.mark.parametrize("order", ORDERS)
    def test_a_tail_cut_at_every_byte(self, source: Path, target: Path, order: Order) -> None:
        write_prompts(source, 4)
        run_job(source, target, settings(order))
        whole = target.read_bytes()
        last = whole.rindex(b"\n", 0, -1) + 1
        for end in range(last - 3, len(whole)):
            target.write_bytes(whole[:end])
            worker = FakeWorker()
            run_job(source, target, settings(order), worker)
            assert sorted(target.read_bytes().splitlines()) == sorted(whole.splitlines())
            assert order == "completion" or target.read_bytes() == whole
            assert len(worker.numbers) == (2 if end < last else 1), end

    @pytest.mark.parametrize("tail", [b"\x00" * 4096, b"{}\n", b"\n", b"null\n", b'{"id": "line-2"}\n', b"\xff\xfe\n"])
    @pytest.mark.parametrize("order", ORDERS)
    def test_what_is_no_answer_is_cut_off(self, source: Path, target: Path, order: Order, tail: bytes) -> None:
        run_job(source, target, settings(order))
        whole = target.read_bytes()
        target.write_bytes(whole[: whole.index(b"\n") + 1] + tail)
        run_job(source, target, settings(order))
        assert sorted(target.read_bytes().splitlines()) == sorted(whole.splitlines())

    def test_an_answer_that_is_there_twice_is_cut_off(self, source: Path, target: Path) -> None:
        run_job(source, target, settings("completion"))
        whole = target.read_bytes()
        first = whole[: whole.index(b"\n") + 1]
        target.write_bytes(first + whole)
        run_job(source, target, settings("completion"))
        assert sorted(target.read_bytes().splitlines()) == sorted(whole.splitlines())

    def test_a_line_missing_in_the_middle_is_put_where_it_belongs(self, source: Path, target: Path) -> None:
        run_job(source, target, settings())
        whole = target.read_bytes().splitlines(keepends=True)
        target.write_bytes(b"".join(whole[:10] + whole[11:]))
        run_job(source, target, settings())
        assert target.read_bytes() == b"".join(whole)

    def test_seeds_are_those_of_the_first_run(self, source: Path, target: Path) -> None:
        source.write_text('{"prompt": "a", "temperature": 1}\n' * 20)
        with pytest.raises(KeyboardInterrupt):
            run_job(source, target, settings(), Stops(6))
        run_job(source, target, settings())
        seeds = [record["response"]["body"]["seed"] for record in records(target)]
        assert seeds == list(range(seeds[0], seeds[0] + 20))

    def test_the_output_removed_by_hand_is_written_anew(self, source: Path, target: Path) -> None:
        run_job(source, target, settings())
        target.unlink()
        worker = FakeWorker()
        run_job(source, target, settings(max_tokens=5), worker)
        assert worker.numbers
        assert len(records(target)) == 40


class TestWhoseOutput:
    @pytest.fixture
    def stopped(self, source: Path, target: Path) -> bytes:
        with pytest.raises(KeyboardInterrupt):
            run_job(source, target, settings(), Stops(9))
        return target.read_bytes()

    def test_another_input_is_refused(self, source: Path, target: Path, stopped: bytes) -> None:
        source.write_bytes(source.read_bytes() + b'{"prompt": "one more"}\n')
        with pytest.raises(JobError, match=r"another input \(in.jsonl, 40 lines; now in.jsonl, 41 lines\)"):
            run_job(source, target, settings())
        assert target.read_bytes() == stopped

    def test_the_same_input_elsewhere_is_the_same(self, source: Path, target: Path, stopped: bytes) -> None:
        moved = source.rename(source.with_name("moved.jsonl"))
        assert run_job(moved, target, settings()).before >= 9

    def test_other_settings_are_refused(self, source: Path, target: Path, stopped: bytes) -> None:
        with pytest.raises(JobError, match=r"other settings \(max_tokens 8, now 9; order input, now completion\)"):
            run_job(source, target, settings("completion", max_tokens=9))
        assert target.read_bytes() == stopped

    def test_no_resume_begins_anew(self, source: Path, target: Path, stopped: bytes) -> None:
        worker = FakeWorker()
        counts = run_job(source, target, settings(max_tokens=9), worker, resume=False)
        assert counts.before == 0
        assert len(records(target)) == 40

    @pytest.mark.parametrize("resume", [True, False])
    def test_a_file_that_is_no_jobs_is_never_touched(self, source: Path, target: Path, resume: bool) -> None:
        target.write_text("my notes\n")
        with pytest.raises(JobError, match="was not written by a batch job"):
            run_job(source, target, settings(), resume=resume)
        assert target.read_text() == "my notes\n"

    def test_an_empty_file_is_taken(self, source: Path, target: Path) -> None:
        target.touch()
        assert run_job(source, target, settings()).done == 40

    @pytest.mark.parametrize("data", [b"", b"{}", b"\xff", b'{"specrun_job": 2}', b'{"specrun_job": 1}', b"[]"])
    def test_a_job_file_that_says_nothing_is_refused(
        self, source: Path, target: Path, stopped: bytes, data: bytes
    ) -> None:
        target.with_name("out.jsonl.job").write_bytes(data)
        with pytest.raises(JobError, match="is no job file"):
            run_job(source, target, settings())
        assert target.read_bytes() == stopped

    def test_two_at_once(self, source: Path, target: Path) -> None:
        with source.open("rb") as stream, open_job(JsonLines(stream, "in"), target, settings()) as job:
            next(job.run(FakeWorker()))
            with pytest.raises(JobError, match="being written by another specrun"):
                run_job(source, target, settings())


@pytest.mark.skipif(os.name == "nt", reason="limits of file sizes are those of Unix")
@pytest.mark.parametrize("order", ORDERS)
def test_a_full_disk_stops_the_job_and_loses_nothing(source: Path, target: Path, order: Order) -> None:
    """At every size at which the disk may be full: one sentence, whole lines only, and the job goes on afterwards."""
    whole = target.with_name("whole.jsonl")
    run_job(source, whole, settings(order))
    code = (
        "import resource, sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[1])\n"
        "from fake_worker import *\nfrom specrun.models_cache.errors import JobError\n"
        "source, target, order = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]\n"
        f"for size in range(0, {whole.stat().st_size}, 97):\n"
        "    for path in target.parent.glob(target.name + '*'): path.unlink()\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
        "    try:\n        run_job(source, target, settings(order))\n"
        "    except JobError as error:\n"
        "        assert 'give the same command again' in str(error), error\n"
        "    else:\n        raise AssertionError(size)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "    if target.exists():\n"
        "        data = target.read_bytes()\n"
        "        assert len(data) <= size and (not data or data.endswith(b'\\n')), size\n"
        "    before = run_job(source, target, settings(order)).before\n"
        "    assert len(records(target)) == 40, size\n"
        "print(before)\n"
    )
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(source), str(target), order]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30
