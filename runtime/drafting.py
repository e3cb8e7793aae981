"""What drafts for an engine: n-grams, a draft model, learned heads, and what its requests showed of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import UsageError
from specrun.models_cache.layout import Bundle
from specrun.models_cache.speculator import InstalledSpeculator
from specrun.runtime.calibration import Calibration, calibrate
from specrun.runtime.chooser import Chooser
from specrun.runtime.device import Device
from specrun.runtime.device import draft_device as device_of_draft
from specrun.runtime.draft_length import AcceptanceEstimate, DraftLengthPlanner
from specrun.runtime.head_estimate import HeadEstimate, estimates
from specrun.runtime.heads import HEAD_METHODS, Heads
from specrun.runtime.ngram_table import NgramTable
from specrun.runtime.predicted_text import PredictedText
from specrun.runtime.proposal import Proposer
from specrun.runtime.proposers import draft as draft_method
from specrun.runtime.proposers import ngram as ngram_method
from specrun.runtime.proposers.combined import CombinedProposer
from specrun.runtime.proposers.lookahead import LookaheadProposer
from specrun.runtime.proposers.offered import OfferedNgrams
from specrun.runtime.request import METHODS, Request
from specrun.runtime.round_costs import RoundCosts
from specrun.runtime.session import TREES, ModelSession, session_opener
from specrun.runtime.tree_planner import Planning
from specrun.runtime.tree_shape import SIDE_VALUE_MARGIN, SIDE_VALUE_REVERIFY
from specrun.runtime.tuning import UNTUNED, Tuning

UNTUNED_ORDER: Final = ("eagle+ngram", "medusa+ngram")
"""What "auto" takes where nothing was measured: a head is asked only where that pays, a draft model always costs."""


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model that is loaded, what its runs cost, and how its tokens fared, greedy (True) and sampled."""

    session: ModelSession
    calibration: Calibration
    estimates: dict[bool, HeadEstimate]


class Drafting:
    """Proposers for the requests of one engine; everything that outlives a request is kept here.

    draft: a draft model, loaded at once, or the speculator of the bundle that serves its method. Other speculators of
    the bundle are loaded by the first request that names their method.
    """

    def __init__(
        self,
        bundle: Bundle,
        draft: Bundle | InstalledSpeculator | None,
        threads: int,
        device: Device,
        tuning: Tuning = UNTUNED,
        context: int | None = None,
        draft_device: str | Device | None = None,
    ) -> None:
        self._bundle = bundle
        self._context = context
        self._threads, self._device = threads, device
        self.draft: ModelSession | None = None
        self.draft_tokens: list[int] = []  # what the draft's KV buffers hold
        self._draft_calibration: Calibration | None = None
        self._draft_vocabulary: NDArray[np.int32] | None = None  # where it has fewer tokens than the target
        self._draft_speculator: InstalledSpeculator | None = None  # what the draft is, if it is the bundle's own
        self._draft_acceptance = draft_method.ACCEPTANCE
        self._draft_estimates = estimates(self._draft_acceptance)
        chosen = draft if isinstance(draft, InstalledSpeculator) else None
        # The method of what was named: the default then, and what "auto" pairs with n-grams.
        self.given = None if draft is None else "draft" if chosen is None else chosen.manifest.method
        if isinstance(draft, Bundle):
            self._load_draft(draft, threads, device_of_draft(device, draft, draft_device))
        elif draft_device is not None:
            raise UsageError(
                "Only a draft model has a device of its own: name one with draft. Speculators of the model itself, "
                "drafts among them, run where it does."
            )
        self._tuning = tuning
        self.heads = Heads(bundle, threads, device, chosen, tuning)
        self.table = self.new_table()
        self._ngram_estimate = self._new_ngram_estimate()

    def automatic(self) -> str:
        """The method that "auto" stands for: n-grams, and with them what was given, or was fastest when tuned.

        N-grams cost next to nothing where they do not pay, and so does a head that is asked only where it pays.
        """
        if self.given is not None:
            return f"{self.given}+ngram"
        paired = [method for method in self.methods if method not in ("none", "lookahead")]
        ordered = sorted(paired, key=lambda method: (*UNTUNED_ORDER, method).index(method))
        tuned = self._tuning.fastest_of(ordered)
        return tuned or next((method for method in UNTUNED_ORDER if method in paired), "ngram")

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that can be run, of `METHODS` without "auto"."""
        bases = {"none", "ngram", "lookahead"}
        bases |= {base for base in ("draft", *HEAD_METHODS) if self.heads.find(base) is not None}
        if self.draft is not None:
            bases.add("draft")
        return tuple(method for method in METHODS if method.partition("+")[0] in bases)

    def require(self, method: str) -> None:
        """Raise UsageError, saying what is missing, if a method cannot be run."""
        base = method.partition("+")[0]
        if base in HEAD_METHODS:
            self.heads.require(base)
        elif base == "draft" and self.draft is None and self.heads.find(base) is None:
            train = f"`specrun train draft --model {self._bundle.manifest.name}`"
            raise UsageError(f"Method '{method}' needs a draft model: give one with --draft, or make one with {train}.")

    def digests(self, methods: Iterable[str]) -> dict[str, str]:
        """By "draft", "medusa" and "eagle", the digest of what drafts for those of the methods that it serves."""
        found = {}
        for base in sorted({method.partition("+")[0] for method in methods} & {"draft", *HEAD_METHODS}):
            speculator = self.heads.find(base)
            if base == "draft" and self.draft is not None:
                found[base] = self.draft.bundle.digest
            elif speculator is not None:
                found[base] = speculator.digest
        return found

    def new_table(self) -> NgramTable:
        """An empty table for this model."""
        return NgramTable(eos_ids=self._bundle.manifest.special_ids.eos)

    def load_ngrams(self, path: Path) -> None:
        """Take the earlier texts and the pool of a saved table."""
        manifest = self._bundle.manifest
        self.table = NgramTable.load(path, tokens=manifest.sizes.tokens, eos_ids=manifest.special_ids.eos)

    def held(self, method: str, prompt: Sequence[int]) -> int:
        """Up to which position the method needs nothing of the prompt from the target."""
        base = method.partition("+")[0]
        return self.heads.held(base, prompt) if base in HEAD_METHODS else len(prompt)

    def reserve(self, method: str, length: int) -> None:
        """Make room for a text of so many tokens."""
        base = method.partition("+")[0]
        if base in HEAD_METHODS:
            self.heads.reserve(base, length)
        if self.draft is not None:
            self.draft.reserve(length)

    def proposer(
        self, request: Request, chooser: Chooser, costs: RoundCosts, prediction: PredictedText | None = None
    ) -> Proposer | None:
        """The proposer of a request, None for plain decoding; loads the speculator that it needs."""
        base, _, second = str(request.method).partition("+")
        fixed = request.options.draft_length
        if base == "none" or fixed == 0:
            return None
        if base == "lookahead":
            return LookaheadProposer(self.table, request.lookahead, tokens=self._bundle.manifest.sizes.tokens)
        planner = DraftLengthPlanner(costs.width, beyond=costs.beyond, fixed=fixed)
        ngram = ngram_method.NgramProposer(self.table, planner, self._ngram_estimate, prediction)
        if base == "ngram":
            return ngram
        other: Planning
        if base in HEAD_METHODS:
            other = self.heads.proposer(base, request, costs, self._side_value(chooser), chooser.noise)
        else:
            other = self._draft_proposer(request, chooser, costs)
        return CombinedProposer(ngram, other, self.heads.lift(base), fixed=fixed is not None) if second else other

    def offered_ngrams(self, request: Request, prediction: PredictedText | None = None) -> OfferedNgrams:
        """N-grams for a request in a row of a batch, over a text of its own: its width is chosen later."""
        planner = DraftLengthPlanner(lambda width: 1.0, fixed=request.options.draft_length)
        ngram = ngram_method.NgramProposer(self.table.beside(), planner, self._ngram_estimate, prediction)
        return OfferedNgrams(ngram)

    def finish(self, request: Request, committed: Sequence[int], *, drafted: bool) -> None:
        """Remember what the caches hold, and the text for later n-gram proposals.

        drafted: whether a proposer was started; if not, the draft's cache still holds what it held before.
        """
        used = str(request.method).split("+")
        if self.draft is not None and "draft" in used and drafted:
            # Where an exception came between commit and rewind, a draft token stands in the newest one's place.
            self.draft_tokens = list(committed[: min(self.draft.length, len(committed) - 1)])
        if used[0] in HEAD_METHODS and drafted:
            self.heads.finish(used[0], committed)
        self.remember(request, committed)

    def remember(self, request: Request, committed: Sequence[int]) -> None:
        """Remember a text for later n-gram proposals, if the request's method copies."""
        if {"ngram", "lookahead"} & {*str(request.method).split("+")}:
            self.table.add_text(committed)

    def forget(self, *, texts_only: bool = False) -> None:
        """Forget every earlier request; texts_only: but not what acceptance they had."""
        self.draft_tokens = []
        self.table = self.new_table()
        if not texts_only:
            self._ngram_estimate = self._new_ngram_estimate()
            self._draft_estimates = self._new_draft_estimates()
        self.heads.forget(texts_only=texts_only)

    def learnt(self, beyond: float) -> Tuning:
        """What requests taught so far; beyond: of the target's runs."""
        ngram = {cell: self._ngram_estimate.chance(cell) for cell in ngram_method.PRIORS}
        heads = self.heads.learnt()
        if self._draft_speculator is not None:
            heads[self._draft_speculator.digest] = self._draft_estimates[True].learnt
        return Tuning({}, beyond, ngram, heads, lifts=self.heads.lifts())

    def begin_from(self, tuning: Tuning) -> None:
        """Forget every earlier request and begin from a tuning."""
        self._tuning = tuning
        self.heads.begin_from(tuning)
        self.forget()

    def _new_ngram_estimate(self) -> AcceptanceEstimate[ngram_method.Cell]:
        return AcceptanceEstimate(self._tuning.ngram or ngram_method.PRIORS)

    def _new_draft_estimates(self) -> dict[bool, HeadEstimate]:
        speculator = self._draft_speculator
        return estimates(
            self._draft_acceptance, None if speculator is None else self._tuning.heads.get(speculator.digest)
        )

    def memory(self, method: str | None = None) -> tuple[int, int]:
        """Bytes of (weights, KV buffers) that are loaded; with `method`, of those that it uses."""
        base = None if method is None else method.partition("+")[0]
        weights, kv = self.heads.memory(base)
        if self.draft is not None and base in (None, "draft"):
            weights, kv = weights + self.draft.bundle.weights_bytes, kv + self.draft.cache.nbytes
        return weights, kv

    @property
    def onnx_seconds(self) -> float:
        """Seconds spent inside ONNX Runtime."""
        return self.heads.onnx_seconds + (self.draft.onnx_seconds if self.draft else 0.0)

    def close(self) -> None:
        """Free sessions and buffers."""
        if self.draft is not None:
            self.draft.close()
        self.heads.close()

    def open_draft(self) -> DraftModel:
        """The draft model, loaded now if it was not; UsageError if there is none."""
        if self.draft is None:
            speculator = self.heads.require("draft")
            bundle = speculator.draft_bundle(self._bundle)
            self._load_draft(bundle, self.heads.threads, device_of_draft(self._device, bundle))
            self._draft_vocabulary = speculator.vocabulary()
            self._draft_acceptance, self._draft_speculator = speculator.manifest.acceptance, speculator
            self._draft_estimates = self._new_draft_estimates()
        assert self.draft is not None
        assert self._draft_calibration is not None
        return DraftModel(self.draft, self._draft_calibration, self._draft_estimates)

    def draft_reader(self, request: Request, chooser: Chooser) -> draft_method.DraftReader:
        """What makes a request's draft tokens of the draft model's logits."""
        sampling = request.options.sampling
        return draft_method.DraftReader(
            chooser,
            self._draft_vocabulary,
            self._bundle.manifest.sizes.vocabulary,
            temperature=1.0 if sampling.greedy else sampling.temperature,
        )

    def _draft_proposer(self, request: Request, chooser: Chooser, costs: RoundCosts) -> draft_method.DraftProposer:
        draft = self.open_draft()
        fixed = request.options.draft_length
        planner = DraftLengthPlanner(costs.width, beyond=costs.beyond, step_cost=draft.calibration.cost(1), fixed=fixed)
        estimate = draft.estimates[request.options.sampling.greedy]
        reader = self.draft_reader(request, chooser)
        return draft_method.DraftProposer(draft.session, reader, planner, estimate, self.draft_tokens)

    def _load_draft(self, draft: Bundle, threads: int, device: Device) -> None:
        open_draft = session_opener(draft, threads, device, shared_cpu=True, context=self._context)
        self._draft_calibration = calibrate(draft, threads, open_draft, device=device)
        self.draft = open_draft(1, self._draft_calibration.rule)

    def _side_value(self, chooser: Chooser) -> float:
        """What side branches of a token tree are worth under the policy of this request."""
        if self._bundle.manifest.kv.window is not None:
            return 0.0
        if TREES in self._bundle.manifest.graphs and not chooser.commits_side_branches:
            return 0.0  # nothing of a tree's run would be exact
        return SIDE_VALUE_MARGIN if chooser.commits_side_branches else SIDE_VALUE_REVERIFY
