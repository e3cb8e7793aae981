"""A reward model as a score: a classifier in ONNX Runtime that reads prompt and answer and gives one number."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
import tokenizers
from numpy.typing import NDArray

from specrun.models_cache.errors import (
    BackendError,
    ContextLengthError,
    IntegrityError,
    ManifestError,
    ScoreError,
    UsageError,
)
from specrun.models_cache.reward import GRAPH, TEMPLATE_NAME, TOKENIZER_NAME, RewardBundle, find_reward
from specrun.runtime.backend import create_session, default_threads, first_line
from specrun.runtime.best_of.candidates import Candidate
from specrun.runtime.chat_template import ChatTemplate
from specrun.runtime.tokenizer import Tokenizer, without_panics

BATCH_TOKENS: Final = 4096
_ONNX_TYPES: Final = {"tensor(int64)": "int64", "tensor(float)": "float32", "tensor(float16)": "float16"}


class RewardScore:
    """What a reward model gives for (prompt, answer): the logit of its one label, else its label's log-softmax.

    The two are put into the model's own chat template, as a user's and the assistant's turn; a model without one gets
    them as a pair of texts. truncate: leave out the beginning of what is too long; otherwise such a candidate gets
    -inf, and `notes` says so. batch_tokens: positions that run at a time, at most, padding included. Safe for several
    threads. Close it, or use it with `with`.

    Raises ManifestError for a manifest that does not describe its graph, IntegrityError, BackendError.
    """

    def __init__(
        self,
        bundle: RewardBundle,
        *,
        threads: int | None = None,
        truncate: bool = False,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        if batch_tokens < 1:
            raise UsageError(f"batch_tokens must be 1 or more, not {batch_tokens}.")
        self.bundle = bundle
        self.name = f"reward:{bundle.manifest.name}"
        self.notes: tuple[str, ...] = ()
        """What the last call of `scores` has to say, a sentence each."""
        self._truncate = truncate
        self._batch_tokens = batch_tokens
        self._lock = threading.Lock()
        self._format = _Format(bundle)
        self._session: Any = create_session(bundle.graph_path, threads=threads or default_threads(), shared_cpu=True)
        self._inputs = _checked_inputs(bundle, self._session)

    @classmethod
    def load(cls, name_or_path: str | Path, *, threads: int | None = None, truncate: bool = False) -> RewardScore:
        """Load the reward model of that name, or in that folder. Raises ModelNotFoundError too."""
        return cls(find_reward(name_or_path), threads=threads, truncate=truncate)

    def scores(self, prompt: str, candidates: Sequence[Candidate]) -> list[float]:
        """See `Score`. Raises ContextLengthError, with both numbers, where no candidate fits the model."""
        return self.rewards([(prompt, candidate.text) for candidate in candidates])

    def rewards(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """The reward of each (prompt, answer), -inf for one that is too long.

        Raises ContextLengthError, with both numbers, where each of them is; ScoreError if ONNX Runtime fails.
        """
        limit = self.bundle.manifest.context
        rows = [self._format.encode(prompt, text, limit if self._truncate else None) for prompt, text in pairs]
        fitting = [index for index, (ids, _) in enumerate(rows) if len(ids) <= limit]
        with self._lock:
            self.notes = self._notes(rows, limit)
            if rows and not fitting:
                shortest = min(len(ids) for ids, _ in rows)
                raise ContextLengthError(
                    f"{self.bundle.manifest.name} reads {limit} tokens, and prompt and answer take {shortest}: ask for "
                    "shorter answers, or choose a reward model with a longer context."
                )
            found = np.full(len(rows), -np.inf)
            for batch in self._batches(fitting, rows):
                found[batch] = self._run([rows[index] for index in batch])
        return [float(value) for value in found]

    def close(self) -> None:
        """Free the session; scores cannot be had any more."""
        with self._lock:
            self._session = None

    def __enter__(self) -> RewardScore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _notes(self, rows: Sequence[tuple[list[int], list[int]]], limit: int) -> tuple[str, ...]:
        long = sum(len(ids) > limit for ids, _ in rows)
        if not long:
            return ()
        return (
            f"{long} of {len(rows)} candidates are longer than the {limit} tokens that {self.bundle.manifest.name} "
            "reads, and cannot be chosen.",
        )

    def _batches(self, indices: Sequence[int], rows: Sequence[tuple[list[int], list[int]]]) -> list[list[int]]:
        """Rows of similar length together; of the same length only where nothing can fill the shorter ones."""
        batches: list[list[int]] = []
        for index in sorted(indices, key=lambda index: len(rows[index][0])):
            length = len(rows[index][0])
            last = batches[-1] if batches else None
            fits = last is not None and (len(last) + 1) * length <= self._batch_tokens
            if last is not None and self.bundle.manifest.pad is None and len(rows[last[0]][0]) != length:
                fits = False
            if last is not None and fits:
                last.append(index)
            else:
                batches.append([index])
        return batches

    def _run(self, rows: Sequence[tuple[list[int], list[int]]]) -> NDArray[np.float64]:
        manifest = self.bundle.manifest
        if self._session is None:
            raise UsageError(f"The reward model {manifest.name} is closed: load it again.")
        width = max(len(ids) for ids, _ in rows)
        feed = {
            "input_ids": np.full((len(rows), width), manifest.pad or 0, np.int64),
            "attention_mask": np.zeros((len(rows), width), np.int64),
            "token_type_ids": np.zeros((len(rows), width), np.int64),
        }
        for row, (ids, types) in enumerate(rows):
            feed["input_ids"][row, : len(ids)] = ids
            feed["attention_mask"][row, : len(ids)] = 1
            feed["token_type_ids"][row, : len(ids)] = types
        try:
            (logits,) = self._session.run(["logits"], {name: feed[name] for name in self._inputs})
        except Exception as error:  # onnxruntime raises classes of its own without a common base
            raise ScoreError(f"The reward model {manifest.name} fails: {first_line(error)}") from error
        values = np.asarray(logits, np.float64)
        if values.shape != (len(rows), len(manifest.labels)) or not np.isfinite(values).all():
            raise ScoreError(
                f"The reward model {manifest.name} gives no number for each of {len(manifest.labels)} labels: "
                "export it again with `specrun export --task reward SOURCE`."
            )
        if values.shape[1] == 1:
            return values[:, 0]
        highest = values.max(1)
        total: NDArray[np.float64] = highest + np.log(np.exp(values - highest[:, None]).sum(1))
        chosen: NDArray[np.float64] = values[:, manifest.label]
        return chosen - total


class _Format:
    """(prompt, answer) as token ids and types, by the model's chat template, else as the tokenizer joins two texts."""

    def __init__(self, bundle: RewardBundle) -> None:
        manifest = bundle.manifest
        document, template = bundle.text(TOKENIZER_NAME), bundle.text(TEMPLATE_NAME)
        assert document is not None  # a manifest without it is refused
        self._bundle = bundle
        self._template = self._pair = None
        self._bos: int | None = None
        if template is not None:
            tokenizer = Tokenizer(document, manifest.special_ids, manifest.tokens, template)
            self._template = ChatTemplate(tokenizer)
            self._bos = manifest.special_ids.bos
            return
        try:
            with without_panics():
                self._pair = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # the library raises a bare Exception
            raise IntegrityError(f"tokenizer.json is not valid ({error}): export the model again") from error
        self._pair.no_padding()
        self._lock = threading.Lock()

    def encode(self, prompt: str, text: str, limit: int | None) -> tuple[list[int], list[int]]:
        """(ids, types); with `limit` no more of them, the beginning left out. Raises UsageError for invalid Unicode."""
        if self._template is not None:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
            ids = self._template.encode_chat(messages, add_generation_prompt=False)
            if limit is not None and len(ids) > limit:
                head = 1 if self._bos is not None and ids[:1] == [self._bos] and limit > 1 else 0
                ids = ids[:head] + ids[len(ids) - limit + head :]
            types = [0] * len(ids)
        else:
            ids, types = self._encode_pair(prompt, text, limit)
        if not ids or max(ids) >= self._bundle.manifest.vocabulary:
            raise IntegrityError(
                f"The tokenizer of {self._bundle.manifest.name} gives ids that its model does not have: "
                "export it again with `specrun export --task reward SOURCE`."
            )
        return ids, types

    def _encode_pair(self, prompt: str, text: str, limit: int | None) -> tuple[list[int], list[int]]:
        assert self._pair is not None
        try:
            (prompt + text).encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError("prompt or answer is not valid Unicode (a lone surrogate): read it as UTF-8") from None
        with self._lock:
            try:
                if limit is None:
                    self._pair.no_truncation()
                else:
                    self._pair.enable_truncation(limit, strategy="longest_first", direction="left")
                with without_panics():
                    found = self._pair.encode(prompt, text)
            except Exception as error:  # the library raises a bare Exception, as for a limit that holds no text
                raise ScoreError(
                    f"The tokenizer of {self._bundle.manifest.name} cannot join prompt and answer: {first_line(error)}"
                ) from error
        return list(found.ids), list(found.type_ids)


def _checked_inputs(bundle: RewardBundle, session: Any) -> tuple[str, ...]:
    """The names of the graph's inputs, which must be what the manifest says, as must be the labels."""
    graph = bundle.manifest.graphs[GRAPH]
    try:
        inputs = {entry.name: (_ONNX_TYPES.get(entry.type), len(entry.shape)) for entry in session.get_inputs()}
        (output,) = session.get_outputs()
    except ValueError:
        raise _lies(bundle) from None
    except Exception as error:
        raise BackendError(f"ONNX Runtime cannot describe {graph.file}: {first_line(error)}") from error
    if inputs != {tensor.name: ("int64", 2) for tensor in graph.inputs}:
        raise _lies(bundle)
    width = output.shape[1] if len(output.shape) == 2 else None
    labels = len(bundle.manifest.labels)
    if output.name != "logits" or output.type not in _ONNX_TYPES or width is None:
        raise _lies(bundle)
    if isinstance(width, int) and width != labels:
        raise _lies(bundle)
    return tuple(inputs)


def _lies(bundle: RewardBundle) -> ManifestError:
    return ManifestError(
        f"{bundle.path}: the manifest does not describe its graph; export the model again with "
        "`specrun export --task reward SOURCE`"
    )
