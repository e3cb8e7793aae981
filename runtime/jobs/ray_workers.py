"""A job on Ray: an actor a worker, each with the bundle loaded once (extra `ray`). A worker that dies loses nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from specrun.models_cache.errors import JobError, SpecrunError, UsageError
from specrun.runtime.jobs.line_request import LineRequest
from specrun.runtime.jobs.worker import Answer

_REQUESTS = 4  # that a worker has, times its batch size: a batch is full until the last few are left
_BATCH_SIZE = 8  # that is reckoned with where none is given
_DEATHS = 3  # one after another, without an answer between them, that end a job
_LOOK_S = 0.2  # between looks for lines that came
_PASSED_ON = ("SPECRUN_HOME",)


@dataclass(slots=True)
class _Slot:
    """A worker: its actor, the process that it runs in, and what it is computing."""

    actor: Any
    process: int
    stream: Any = None
    requests: dict[int, LineRequest] = field(default_factory=dict)


class RayWorkers:
    """Actors on the cluster that RAY_ADDRESS names, or on this machine.

    engine: what `Engine.load` takes, `model` included; every machine needs the bundle at the same place. workers: how
    many, by default one for each machine. Raises UsageError without Ray; JobError where workers keep dying.
    """

    def __init__(self, engine: Mapping[str, Any], *, workers: int | None = None, batch_size: int | None = None) -> None:
        ray = _ray()
        self._owned = not ray.is_initialized()
        if self._owned:
            local: dict[str, Any] = {}
            if not os.environ.get("RAY_ADDRESS"):  # nobody outside this machine needs to reach it
                local = {"num_cpus": max(os.cpu_count() or 1, workers or 1), "_node_ip_address": "127.0.0.1"}
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no network for what needs none
            os.environ.setdefault("RAY_worker_niceness", "0")  # beside other programs as fast as without Ray
            try:
                ray.init(log_to_driver=False, logging_level="error", include_dashboard=False, **local)
            except (OSError, RuntimeError, ValueError) as error:  # what Ray raises for a cluster that is not there
                what = (str(error).splitlines() or [type(error).__name__])[0]
                raise JobError(f"Ray cannot be started or joined ({what}): see to it, or leave --engine out") from error
        machines = max(1, sum(bool(node["Alive"]) for node in ray.nodes()))
        self.workers = workers or machines
        self._batch_size = batch_size
        self._engine = dict(engine)
        if self._engine.get("threads") is None:
            here = -(-self.workers // machines)  # on one machine, at most
            self._engine["threads"] = max(1, (os.cpu_count() or 1) // here)
        passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        self._actor = ray.remote(_Actor).options(
            num_cpus=0, scheduling_strategy="SPREAD", runtime_env={"env_vars": passed}
        )
        self._slots: list[_Slot] = []

    @property
    def processes(self) -> list[int]:
        """The ids of the workers' processes, each on its machine."""
        return [slot.process for slot in self._slots]

    def answers(self, requests: Iterable[LineRequest | None]) -> Iterator[Answer]:
        """The answers in order of completion; closing the iterator ends the workers."""
        ray = _ray()
        left = iter(requests)
        waiting: list[LineRequest] = []  # read, or lost by a worker that died
        deaths = 0
        actors = [self._actor.remote(self._engine, self._batch_size) for _ in range(self.workers)]
        processes = [actor.process.remote() for actor in actors]
        try:
            self._slots = [_Slot(actor, ray.get(process)) for actor, process in zip(actors, processes, strict=True)]
            while True:
                for slot in self._slots:
                    if slot.stream is None:
                        self._give(slot, waiting, left)
                busy = {slot.stream: slot for slot in self._slots if slot.stream is not None}
                if not busy:
                    return
                idle = len(busy) < len(self._slots)  # then lines may come that one of them can take
                ready, _ = ray.wait(list(busy), num_returns=1, timeout=_LOOK_S if idle else None)
                if not ready:
                    continue
                slot = busy[ready[0]]
                try:
                    answer: Answer = ray.get(next(slot.stream))
                except StopIteration:
                    slot.stream = None
                    waiting[:0] = slot.requests.values()  # a worker that answered all has none left
                    slot.requests = {}
                except ray.exceptions.RayTaskError as error:
                    raise _cause(error) from error
                except ray.exceptions.RayError as error:
                    deaths += 1
                    if deaths >= _DEATHS:
                        raise JobError(
                            f"workers die one after another (the last one: process {slot.process}); see to their "
                            "memory and give the same command again"
                        ) from error
                    waiting[:0] = slot.requests.values()
                    actor = self._actor.remote(self._engine, self._batch_size)
                    self._slots[self._slots.index(slot)] = _Slot(actor, ray.get(actor.process.remote()))
                else:
                    deaths = 0
                    del slot.requests[answer.number]
                    yield answer
        finally:
            for actor in [*actors, *(slot.actor for slot in self._slots)]:
                ray.kill(actor)
            self._slots = []

    def close(self) -> None:
        """Leave Ray, if it was joined here."""
        if self._owned:
            _ray().shutdown()

    def _give(self, slot: _Slot, waiting: list[LineRequest], left: Iterator[LineRequest | None]) -> None:
        """Give a worker its next requests; fewer when few are left, so that all workers end together."""
        most = _REQUESTS * (self._batch_size or _BATCH_SIZE)
        for request in itertools.islice(left, max(0, self.workers * most - len(waiting))):
            if request is None:
                break
            waiting.append(request)
        count = min(most, -(-len(waiting) // self.workers))
        if count:
            slot.requests = {request.number: request for request in waiting[:count]}
            del waiting[:count]
            requests = list(slot.requests.values())
            slot.stream = slot.actor.answers.options(num_returns="streaming").remote(requests)


class _Actor:
    """What runs in a worker's process; the engine is loaded by its first requests."""

    def __init__(self, engine: dict[str, Any], batch_size: int | None) -> None:
        self._engine = engine
        self._batch_size = batch_size
        self._worker: Any = None

    def process(self) -> int:
        return os.getpid()

    def answers(self, requests: list[LineRequest]) -> Iterator[Answer]:
        if self._worker is None:
            from specrun.runtime import Engine
            from specrun.runtime.jobs.worker import EngineWorker

            self._worker = EngineWorker(Engine.load(**self._engine), self._batch_size)
        yield from self._worker.answers(requests)


def _cause(error: Any) -> Exception:
    cause = getattr(error, "cause", None)
    if isinstance(cause, SpecrunError):
        return cause
    return JobError(f"a worker failed ({type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''})")


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UsageError("Ray is not installed: install it with `pip install 'specrun[ray]'`.") from error
    return ray
