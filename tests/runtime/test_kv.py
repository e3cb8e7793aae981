"""KV caches and sessions: rewinding, growing, and drafts that stay in step with the target."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from specrun.runtime import kv_cache
from specrun.runtime.chooser import Chooser
from specrun.runtime.kv_cache import KVCache
from specrun.runtime.loop import Limits, speculate
from specrun.runtime.options import GenerationOptions
from specrun.runtime.proposal import EMPTY, Proposal
from specrun.runtime.result import SpeculationStats, Token
from specrun.runtime.session import ModelSession
from specrun.runtime.target_run import alone

from .checks import check_counters, make_speculation_pay, text_of
from .conftest import TinyModels
from .tiny_bundles import PROMPT


class Scripted:
    """A proposer that says what it is told: `script(committed, limit)`."""

    name = "scripted"
    needs_features = False

    def __init__(self, script) -> None:
        self._script = script
        self.calls: list[tuple[str, object]] = []

    def start(self, prompt_tokens: Sequence[int]) -> None:
        self.calls.append(("start", len(prompt_tokens)))

    def propose(self, committed: Sequence[int], limit: int) -> Proposal:
        proposal = self._script(committed, limit)
        self.calls.append(("propose", len(proposal)))
        return proposal

    def observe(self, *, evaluated: int, accepted: int, path: tuple[int, ...]) -> None:
        self.calls.append(("observe", (evaluated, accepted)))

    def rewind_to(self, length: int) -> None:
        self.calls.append(("rewind_to", length))

    def close(self) -> None:
        self.calls.append(("close", None))


def decode(
    session: ModelSession, prompt: Sequence[int], count: int, proposer: Scripted | None = None, eos: Sequence[int] = ()
) -> tuple[list[int], SpeculationStats, list[list[Token]]]:
    """Run the loop by itself; the lengths of its table hold after each round."""
    session.rewind_to(0)
    committed, stats = list(prompt), SpeculationStats()
    chooser = Chooser(GenerationOptions(), prompt=committed, tokens=session.sizes.tokens, eos=eos)
    limits = Limits(len(prompt) + count, 64, frozenset(eos))
    blocks = []
    for block in alone(session, speculate(session, proposer, chooser, committed, limits, stats)):
        blocks.append(block)
        assert session.length == len(committed) - 1
    assert [token.id for block in blocks for token in block] == committed[len(prompt) :]
    return committed[len(prompt) :], stats, blocks


@pytest.fixture
def session(models: TinyModels) -> ModelSession:
    return models.engine("tgt").target


@pytest.fixture
def prompt(models: TinyModels) -> list[int]:
    return models.engine("tgt").encode(PROMPT, raw=True)


@pytest.mark.parametrize("right", [0, 1, 2, 3, 4, 5])
def test_the_loop_commits_the_right_part_of_a_proposal(session: ModelSession, prompt: list[int], right: int) -> None:
    """Proposals of 5 tokens of which the first `right` are right: each round accepts just these."""
    text, _, _ = decode(session, prompt, 60)

    def script(committed: Sequence[int], limit: int) -> Proposal:
        done = len(committed) - len(prompt)
        ahead = text[done : done + min(5, limit)]
        return Proposal(tuple(t if i < right else (t + 1) % 200 for i, t in enumerate(ahead)), "deterministic")

    proposer = Scripted(script)
    got, stats, _ = decode(session, prompt, 60, proposer)
    assert got == text
    assert stats.decided == 60
    histogram = stats.to_json()["accepted_histogram"]
    assert sum(histogram) == stats.rounds
    assert stats.rounds - histogram[right] <= 2  # the last rounds are cut short by the limit
    assert stats.accepted == sum(index * n for index, n in enumerate(histogram))
    assert [name for name, _ in proposer.calls[:4]] == ["start", "propose", "observe", "rewind_to"]
    observed = [value for name, value in proposer.calls if name == "observe"]
    assert sum(accepted for _, accepted in observed) == stats.accepted
    assert sum(evaluated for evaluated, _ in observed) == stats.evaluated
    rewound = [value for name, value in proposer.calls if name == "rewind_to"]
    assert rewound[0] == len(prompt) + 1 + observed[0][1]


def test_the_loop_ends_at_eos_wherever_it_stands(session: ModelSession, prompt: list[int]) -> None:
    """koboldcpp#1276: EOS as prefill token, as draft at each place, as correction and as bonus."""
    text, _, _ = decode(session, prompt, 40)
    for at in range(12):
        eos = text[at]
        end = text.index(eos) + 1
        for size in (1, 2, 3, 4, 8):
            for wrong_at in (None, at):

                def script(committed, limit, size=size, wrong_at=wrong_at):
                    done = len(committed) - len(prompt)
                    ahead = list(text[done : done + min(size, limit)])
                    if wrong_at is not None and done <= wrong_at < done + len(ahead):
                        ahead[wrong_at - done] = (ahead[wrong_at - done] + 1) % 200
                    return Proposal(tuple(ahead), "deterministic")

                got, stats, _ = decode(session, prompt, 40, Scripted(script), [eos])
                assert got == text[:end]
                assert stats.decided == end
                assert stats.accepted <= stats.evaluated <= stats.proposed


def test_proposals_after_rounds_without(session: ModelSession, prompt: list[int]) -> None:
    """vllm-metal#716: k = 3, 0, 0, 3, ...: full acceptance on return."""
    text, _, _ = decode(session, prompt, 60)
    sizes = [3, 0, 0, 3] * 20
    rounds = iter(sizes)

    def script(committed: Sequence[int], limit: int) -> Proposal:
        done = len(committed) - len(prompt)
        return Proposal(tuple(text[done : done + min(next(rounds), limit)]), "deterministic")

    got, stats, _ = decode(session, prompt, 60, Scripted(script))
    assert got == text
    assert stats.accepted == stats.proposed > 30


def test_a_draft_model_after_rounds_without(models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-metal#716: SELF drafts 3, 0, 0, 3, ... tokens a round: everything is accepted."""
    from specrun.runtime.proposers.draft import DraftProposer

    engine = models.engine("tgt", "self")
    plain = engine.generate(PROMPT, method="none", max_tokens=80, raw=True, ignore_eos=True)
    sizes = iter([3, 0, 0, 3] * 40)
    propose = DraftProposer.propose
    monkeypatch.setattr(
        DraftProposer, "propose", lambda self, committed, limit: propose(self, committed, min(limit, next(sizes)))
    )
    result = engine.generate(PROMPT, method="draft", draft_length=3, max_tokens=80, raw=True, ignore_eos=True)
    assert result.token_ids == plain.token_ids
    assert result.speculation.accepted == result.speculation.proposed > 40


def test_full_acceptance_over_a_long_text(models: TinyModels) -> None:
    """mlc-llm#2285: SELF, k 4, 200 tokens: acceptance >= 99 %, cache lengths agree each round."""
    engine = models.engine("tgt", "self")
    stream = engine.stream(PROMPT, method="draft", draft_length=4, max_tokens=200, raw=True, ignore_eos=True)
    prompt = len(stream.prompt_tokens)
    draft = engine.drafting.draft
    assert draft is not None
    seen = 0
    for _ in stream:
        assert 0 <= draft.length <= engine.target.length
        assert engine.target.length >= prompt
        seen += 1
    assert seen > 40
    assert stream.result.speculation.acceptance_rate >= 0.99
    assert stream.result.speculation.mean_accepted_tokens > 4.8
    assert engine.target.length == prompt + 199
    check_counters(stream.result)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "seed": 5}])
def test_proposals_equal_those_of_a_fresh_draft(
    models: TinyModels, monkeypatch: pytest.MonkeyPatch, sampling: dict[str, float]
) -> None:
    """mlxcel#1002: MIX, 400 tokens: each proposal is that of a draft which has just read all committed tokens."""
    from specrun.runtime.proposers.draft import DraftProposer

    engine = models.engine("tgt", "mix")
    fresh = models.engine("mix")
    propose = DraftProposer.propose
    compared = [0]

    def checked(self: DraftProposer, committed: Sequence[int], limit: int) -> Proposal:
        proposal = propose(self, committed, limit)
        session = fresh.target
        session.rewind_to(0)
        text = list(committed)
        for token in proposal.tokens:
            logits = session.prefill(text[session.length :])
            drafted, _ = self._reader._chooser.draft(logits[0], text[len(committed) :], len(committed))
            assert drafted == token
            text.append(token)
            compared[0] += 1
        return proposal

    monkeypatch.setattr(DraftProposer, "propose", checked)
    make_speculation_pay(engine, monkeypatch)
    for draft_length in (4, None):
        result = engine.generate(
            PROMPT, method="draft", draft_length=draft_length, max_tokens=400, raw=True, ignore_eos=True, **sampling
        )
        assert 0 < result.speculation.accepted < result.speculation.evaluated
    assert compared[0] > 400


def test_five_rewinds(models: TinyModels) -> None:
    """onnxruntime-genai#2140: prompts of 5, 3, 40, 1, 12 tokens, one after another: each equals a fresh engine."""
    used, fresh = models.engine("tgt", "mix"), models.engine("tgt", "mix-int8")
    tokens = text_of(40)
    for method in ("draft", "none", "ngram"):
        for count in (5, 3, 40, 1, 12):
            for options in ({"draft_length": 4}, {"draft_length": None}):
                again = used.generate(tokens[:count], method=method, max_tokens=24, raw=True, **options)
                fresh.reset()
                first = fresh.generate(tokens[:count], method="none", max_tokens=24, raw=True)
                assert again.token_ids == first.token_ids


def test_a_draft_request_that_drafts_nothing_keeps_the_draft_true(models: TinyModels) -> None:
    """After a request with K = 0 the draft's cache is not taken for that request's: proposals stay as good."""
    engine = models.engine("tgt", "self")
    first, second = text_of(60), "abc" + text_of(60)
    for middle in ({"method": "draft", "draft_length": 0}, {"method": "none"}, {"method": "ngram"}):
        engine.reset()
        options = {"max_tokens": 40, "raw": True, "ignore_eos": True}
        engine.generate(first, method="draft", draft_length=4, **options)
        engine.generate(second, **middle, **options)
        result = engine.generate(second, method="draft", draft_length=4, **options)
        assert result.speculation.acceptance_rate == 1.0, middle


# The cache itself


def test_cache_rewinds_to_an_absolute_length() -> None:
    """mlx-lm#1109: a rollback is never a silent no-op, and never goes forward."""
    cache = KVCache(layers=1, kv_heads=1, head_dim=2, capacity=10, limit=1000, batch=2)
    cache.lengths[:] = [7, 3]
    cache.rewind_to(5)
    cache.rewind_to(5)
    assert cache.lengths == [5, 3]
    cache.rewind_to(0, row=1)
    assert cache.lengths == [5, 0]
    for length, row in ((6, 0), (-1, 0), (1, 1)):
        with pytest.raises(ValueError, match="cannot rewind"):
            cache.rewind_to(length, row=row)
    assert cache.lengths == [5, 0]


def test_cache_grows_in_steps_and_keeps_its_content(rng: np.random.Generator) -> None:
    cache = KVCache(layers=2, kv_heads=2, head_dim=4, capacity=10, limit=700, batch=3)
    assert cache.capacity == kv_cache.CAPACITY_STEP
    cache.lengths[:] = [100, 256, 0]
    content = [rng.standard_normal(value.numpy().shape).astype(np.float32) for value in cache.values]
    for value, array in zip(cache.values, content, strict=True):
        value.numpy()[:] = array
    assert not cache.reserve(256)
    assert cache.reserve(257)
    assert cache.capacity == 512
    assert cache.nbytes == 4 * 3 * 2 * 512 * 4 * 4
    for value, array in zip(cache.values, content, strict=True):
        assert (value.numpy()[:, :, :256] == array).all()
    cache.rewind_to(0, row=1)  # what lies behind a length stays too: nodes of a tree that is being drafted
    assert cache.reserve(600)
    for value, array in zip(cache.values, content, strict=True):
        assert (value.numpy()[:, :, :256] == array).all()
    assert cache.capacity == 700
    with pytest.raises(ValueError, match=r"701 .* 700"):
        cache.reserve(701)
    assert cache.capacity == 700
    cache.close()
    assert cache.nbytes == 0


def test_append_after_rewind(session: ModelSession, prompt: list[int]) -> None:
    """Whatever was run and rewound: the next logits are those of a cache that never held it."""
    tokens = [*prompt, *range(20, 80)]
    session.rewind_to(0)
    expected = session.run(tokens, rows=len(tokens)).copy()
    rng = np.random.default_rng(3)
    session.rewind_to(0)
    for _ in range(60):
        length = int(rng.integers(0, session.length + 1))
        session.rewind_to(length)
        junk = rng.integers(3, 200, int(rng.integers(1, 20))).tolist()
        session.run(junk, rows=1)
        session.rewind_to(length)
        count = int(rng.integers(1, 12))
        if length + count > len(tokens):
            continue
        rows = session.run(tokens[length : length + count], rows=count)
        assert (rows == expected[length : length + count]).all()


def test_an_empty_proposal_is_a_plain_step(session: ModelSession, prompt: list[int]) -> None:
    text, _, _ = decode(session, prompt, 20)
    got, stats, _ = decode(session, prompt, 20, Scripted(lambda committed, limit: EMPTY))
    assert got == text
    assert (stats.proposed, stats.bonuses, stats.rounds) == (0, 19, 19)
