"""The learned heads of an engine: found in its bundle, loaded when a request first asks for one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import ModelNotFoundError, UnsupportedModelError, UsageError
from specrun.models_cache.layout import Bundle, find_bundle
from specrun.models_cache.speculator import InstalledSpeculator, find_speculator, scan_speculators, speculators_dir
from specrun.runtime.backend import create_session, threads_are_shared
from specrun.runtime.coupled_noise import CoupledNoise
from specrun.runtime.device import Device
from specrun.runtime.feature_rows import Columns, pick_columns
from specrun.runtime.head_estimate import HeadEstimate, Learnt, estimates
from specrun.runtime.head_sampling import HeadSampling
from specrun.runtime.proposers.combined import Lift
from specrun.runtime.proposers.eagle import EagleCosts, EagleProposer, Slots
from specrun.runtime.proposers.medusa import MedusaProposer
from specrun.runtime.proposers.nodes import Outlook
from specrun.runtime.request import Request
from specrun.runtime.round_costs import RoundCosts
from specrun.runtime.speculator import EagleSession, MedusaSession
from specrun.runtime.tree_planner import TreePlanner
from specrun.runtime.tuning import UNTUNED, Tuning

HEAD_METHODS: Final = ("medusa", "eagle")
ONE_THREAD_UP_TO: Final = 1024
"""Hidden size up to which a head with threads of its own has one: its matrices are so small that waking others costs
more, and the target's, which still wait for work, are not in its way."""


def find_draft(bundle: Bundle, name_or_path: str | Path) -> Bundle | InstalledSpeculator:
    """What `--draft` names: a speculator of the bundle, by its name or folder, or else a draft model."""
    path = Path(name_or_path)
    if (speculators_dir(bundle) / path.name).is_dir() and (
        path.parent == Path() or path.resolve().parent == speculators_dir(bundle).resolve()
    ):
        return find_speculator(bundle, path.name)
    try:
        return find_bundle(name_or_path)
    except ModelNotFoundError as error:
        names = ", ".join(found.name for found in scan_speculators(bundle))
        if not names or path.parent != Path():
            raise
        name = bundle.manifest.name
        raise ModelNotFoundError(f"{name} has no speculator '{path}' (it has: {names}), and {error}") from None


@dataclass(slots=True)
class LoadedHead:
    """A loaded head, with what requests have shown of it. `costs` are those of a run of Medusa in `append`."""

    speculator: InstalledSpeculator
    session: MedusaSession | EagleSession
    columns: Columns
    vocabulary: NDArray[np.int64]
    costs: EagleCosts
    estimates: dict[bool, HeadEstimate] = field(default_factory=dict)
    outlooks: dict[bool, Outlook] = field(default_factory=dict)
    slots: Slots = field(default_factory=Slots)

    def forget(self, learnt: Learnt | None) -> None:
        """As just loaded; learnt: what is known of it."""
        self.estimates = estimates(self.speculator.manifest.acceptance, learnt)
        self.outlooks = {greedy: Outlook() for greedy in (True, False)}
        self.slots = Slots()


class Heads:
    """`chosen`: the speculator that was asked for by name; otherwise the first one of a method serves it."""

    def __init__(
        self,
        bundle: Bundle,
        threads: int,
        device: Device,
        chosen: InstalledSpeculator | None = None,
        tuning: Tuning = UNTUNED,
    ) -> None:
        self._bundle = bundle
        small = bundle.manifest.sizes.hidden <= ONE_THREAD_UP_TO
        self._threads = 1 if small and not threads_are_shared() else threads
        self._device = device
        self._chosen = chosen
        self._tuning = tuning
        self._found: dict[str, InstalledSpeculator] = {}
        self._lifts: dict[str, Lift] = {}
        self._loaded: dict[str, LoadedHead] = {}

    @property
    def threads(self) -> int:
        """Threads of a head."""
        return self._threads

    def find(self, method: str) -> InstalledSpeculator | None:
        """The speculator that serves a method, None if there is none."""
        if self._chosen is not None and self._chosen.manifest.method == method:
            return self._chosen
        if method not in self._found:
            there = [found for found in self._bundle.speculators() if found.manifest.method == method]
            if not there:
                return None  # one may be made while the engine is in use
            self._found[method] = there[0]
        return self._found[method]

    def require(self, method: str) -> InstalledSpeculator:
        """The speculator that serves a method, or an error that says how to get one."""
        found = self.find(method)
        name = self._bundle.manifest.name
        if found is None:
            broken = [entry for entry in scan_speculators(self._bundle) if entry.problem is not None]
            if broken:
                raise UsageError(f"Method '{method}' has no speculator that can be used: {broken[0].problem}.")
            raise UsageError(
                f"Method '{method}' needs a speculator, and {name} has none: make one with "
                f"`specrun train {method} --model {name}`, or pull the model again."
            )
        if method in HEAD_METHODS and self._bundle.manifest.features is None:
            raise UnsupportedModelError(
                f"{name} was exported before heads were known, and its graph has no features for them: export it again."
            )
        return found

    def held(self, method: str, prompt: Sequence[int]) -> int:
        """Up to which position a head of this method needs no features of the prompt from the target."""
        head = self.loaded(method)
        if isinstance(head.session, EagleSession):
            return sum(head.slots.shared(prompt, head.session.length))
        return len(prompt)

    def proposer(
        self, method: str, request: Request, costs: RoundCosts, side_value: float, noise: CoupledNoise
    ) -> MedusaProposer | EagleProposer:
        """The proposer of a request; loads the head if this is the first one."""
        head = self.loaded(method)
        options = request.options
        greedy = options.sampling.greedy
        tokens = self._bundle.manifest.sizes.tokens
        sampling = HeadSampling(
            options.sampling, head.vocabulary, noise, tokens=tokens, sample_index=request.sample_index
        )
        planner = TreePlanner(costs.width, beyond=costs.beyond, fixed=options.draft_length, side_value=side_value)
        shared = (head.columns, sampling, planner, head.estimates[greedy], head.outlooks[greedy])
        if isinstance(head.session, MedusaSession):
            return MedusaProposer(head.session, *shared, run_cost=head.costs.append)
        positions = head.speculator.manifest.sizes.positions
        return EagleProposer(head.session, *shared, costs=head.costs, positions=positions, known=head.slots)

    def draft_costs(self, method: str) -> tuple[float, float]:
        """Seconds of the first draft token of a round, and of each further one; loads the head if it is not yet."""
        costs = self.loaded(method).costs
        return costs.append, costs.level(1) if costs.levels else 0.0

    def lift(self, method: str) -> Lift:
        """What asking this method beside n-grams brought so far."""
        return self._lifts.setdefault(method, Lift(self._tuning.lifts.get(method, ())))

    def reserve(self, method: str, length: int) -> None:
        """Make room for a text of so many tokens."""
        session = self.loaded(method).session
        if isinstance(session, EagleSession):
            session.reserve(length)

    def finish(self, method: str, committed: Sequence[int]) -> None:
        """A request ended: remember which text the slots of a head's cache belong to."""
        head = self.loaded(method)
        if isinstance(head.session, EagleSession):
            head.slots.tokens = list(committed[: head.slots.first + head.session.length + 1])

    def forget(self, *, texts_only: bool = False) -> None:
        """Forget every earlier request; texts_only: but not what acceptance they had."""
        if not texts_only:
            self._lifts.clear()
        for head in self._loaded.values():
            if texts_only:
                head.slots = Slots()
            else:
                head.forget(self._tuning.heads.get(head.speculator.digest))

    def learnt(self) -> dict[str, Learnt]:
        """What requests taught of each head that is loaded, by its speculator's digest."""
        return {head.speculator.digest: head.estimates[True].learnt for head in self._loaded.values()}

    def lifts(self) -> dict[str, tuple[float, ...]]:
        """What asking each head beside n-grams brought."""
        return {method: lift.values for method, lift in self._lifts.items()}

    def first_chances(self, method: str) -> tuple[float, ...]:
        """By depth, the chance that the best candidate of a method's head stands, as greedy requests showed it."""
        return tuple(chances[0] for chances in self.loaded(method).estimates[True].by_rank())

    def begin_from(self, tuning: Tuning) -> None:
        """Forget every earlier request and begin from a tuning."""
        self._tuning = tuning
        self.forget()

    def memory(self, method: str | None = None) -> tuple[int, int]:
        """Bytes of the weights that are loaded and of the heads' caches; with `method`, those of its head."""
        heads = [head for name, head in self._loaded.items() if method in (None, name)]
        return sum(head.speculator.weights_bytes for head in heads), sum(head.session.kv_bytes for head in heads)

    @property
    def onnx_seconds(self) -> float:
        """Seconds that the heads spent inside ONNX Runtime."""
        return sum(head.session.onnx_seconds for head in self._loaded.values())

    def close(self) -> None:
        """Free sessions and caches."""
        for head in self._loaded.values():
            head.session.close()
        self._loaded.clear()

    def loaded(self, method: str) -> LoadedHead:
        """The head of a method, loaded now if it was not."""
        head = self._loaded.get(method)
        if head is None:
            head = self._loaded[method] = self._load(self.require(method))
        return head

    def _load(self, speculator: InstalledSpeculator) -> LoadedHead:
        manifest = speculator.manifest
        sizes, features = manifest.sizes, self._bundle.manifest.features
        assert features is not None
        columns = pick_columns(features.taps, manifest.taps, sizes.hidden)
        width = len(manifest.taps) * sizes.hidden
        onnx_session = create_session(
            speculator.graph_path(), threads=self._threads, device=self._device, shared_cpu=True
        )
        session: MedusaSession | EagleSession
        if manifest.method == "medusa":
            session = MedusaSession(
                manifest.name,
                onnx_session,
                heads=sizes.depth,
                feature_width=width,
                draft_vocabulary=sizes.draft_vocabulary,
                device=self._device,
            )
            costs = EagleCosts(session.measure(), ())
        else:
            session = EagleSession(
                manifest.name,
                onnx_session,
                feature_width=width,
                hidden=sizes.hidden,
                kv_heads=sizes.kv_heads,
                head_dim=sizes.head_dim,
                draft_vocabulary=sizes.draft_vocabulary,
                positions=sizes.positions,
                device=self._device,
            )
            costs = EagleCosts(*session.measure())
        ids = speculator.vocabulary()
        vocabulary = np.arange(sizes.draft_vocabulary) if ids is None else ids.astype(np.int64)
        head = LoadedHead(speculator, session, columns, vocabulary, costs)
        head.forget(self._tuning.heads.get(speculator.digest))
        return head
