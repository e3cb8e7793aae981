"""The graphs that judge and copy on the device, run on the CPU provider: the numpy rules decide what is right.

Together the cases of the three rules are 100,000.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from specrun.runtime.acceptance import NodeStep, accept_tree, choose_child, sampled_children
from specrun.runtime.device_graphs import copy_graph, drawn_graph, greedy_graph, ratio_graph, top_graph
from specrun.runtime.device_rows import tree_inputs
from specrun.runtime.onnx_writer import FLOAT, FLOAT16
from specrun.runtime.options import SamplingOptions
from specrun.runtime.proposal import Proposal
from specrun.runtime.sampling import Distribution, distribution, greedy_tokens, sample

TOKENS, VOCABULARY = 21, 24
GREEDY_CASES, DRAWN_CASES, RATIO_CASES = 40_000, 30_000, 30_000


class Stream:
    """Uniforms that a test knows, and how many were taken."""

    def __init__(self, numbers: Sequence[float]) -> None:
        self.numbers = numbers
        self.taken = 0

    def uniform(self) -> float:
        self.taken += 1
        return float(self.numbers[self.taken - 1])


def session(model: bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def random_tree(rng: np.random.Generator) -> Proposal:
    """Up to seven nodes, siblings different."""
    parents: list[int] = []
    tokens: list[int] = []
    for _ in range(int(rng.integers(0, 8))):
        parent, token = int(rng.integers(-1, len(tokens))), int(rng.integers(0, 5))
        if (parent, token) not in zip(parents, tokens, strict=True):
            parents.append(parent)
            tokens.append(token)
    return Proposal(tuple(tokens), "deterministic", parents=tuple(parents))


def walk(proposal: Proposal, choice: Callable[[int], int]) -> tuple[tuple[int, ...], int | None]:
    def step(node: int, children: tuple[int, ...]) -> NodeStep:
        return choose_child(children, choice(node + 1))

    outcome = accept_tree(proposal, step)
    return outcome.path, outcome.next_token


def path_of(taken: np.ndarray) -> tuple[int, ...]:
    return tuple(np.flatnonzero(taken).tolist())


@pytest.mark.parametrize(
    "model",
    [copy_graph(3, FLOAT), copy_graph(2, FLOAT16), *(make(300) for make in (greedy_graph, drawn_graph, ratio_graph))],
)
def test_the_files_pass_the_checker(model: bytes) -> None:
    onnx.checker.check_model(onnx.load_from_string(model), full_check=True)


def test_the_greedy_rule_is_that_of_numpy() -> None:
    rng = np.random.default_rng(7)
    graph = session(greedy_graph(TOKENS))
    nodes = 0
    for _ in range(GREEDY_CASES):
        proposal = random_tree(rng)
        # Few values, so that ties are common; padding of the vocabulary would win everywhere.
        logits = rng.integers(-3, 4, (len(proposal) + 1, VOCABULARY)).astype(np.float32) / 2
        logits[:, 5:TOKENS] -= 1
        logits[:, TOKENS:] = 9
        best = greedy_tokens(logits, TOKENS)
        path, token = walk(proposal, lambda row, best=best: int(best[row]))
        choices, peaks, odd, taken, following = graph.run(None, {"logits": logits, **tree_inputs(proposal)})
        assert choices.tolist() == best.tolist()
        assert (path_of(taken), following.tolist()) == (path, [token])
        assert not odd.any()
        assert np.array_equal(peaks, logits[:, :TOKENS].max(axis=1))
        nodes += len(path)
    assert nodes > GREEDY_CASES // 5  # trees were gone into


def test_the_point_mass_rule_is_that_of_numpy() -> None:
    rng = np.random.default_rng(8)
    graph = session(drawn_graph(TOKENS))
    nodes = 0
    for _ in range(DRAWN_CASES):
        proposal = random_tree(rng)
        logits = rng.normal(0, 2, (len(proposal) + 1, VOCABULARY)).astype(np.float32)
        logits[:, :3] += 3
        logits[:, 7] = -np.inf
        options = SamplingOptions(temperature=float(rng.choice([0.5, 1.0, 1.7])), mode="rejection", seed=0)
        stream = Stream(rng.random(len(proposal) + 1))
        drawn: dict[int, int] = {}

        def choice(row: int) -> int:
            p = distribution(logits[row], None, options, tokens=TOKENS)  # noqa: B023 - called within the pass
            drawn[row] = sample(p, stream.uniform())  # noqa: B023
            return drawn[row]  # noqa: B023

        path, token = walk(proposal, choice)
        inputs = tree_inputs(proposal)
        depth = np.concatenate([[0], inputs["ancestors"].sum(axis=1)]).astype(int)
        choices, _, _, taken, following = graph.run(
            None,
            {
                "logits": logits,
                **inputs,
                "inverse_temperature": np.array([1 / options.temperature]),
                "uniforms": np.asarray(stream.numbers)[depth],
            },
        )
        assert {row: int(choices[row]) for row in drawn} == drawn
        assert (path_of(taken), following.tolist()) == (path, [token])
        assert stream.taken == len(path) + 1
        nodes += len(path)
    assert nodes > DRAWN_CASES // 5


def ratio_by_numpy(
    p: np.ndarray, q: np.ndarray, drafts: Sequence[int], uniforms: np.ndarray
) -> tuple[int, int | None, int]:
    stream: Any = Stream(uniforms)
    whole = [Distribution.from_dense(row) for row in p]
    proposal = Proposal(tuple(drafts), "sampled", tuple(Distribution.from_dense(row) for row in q))

    def step(node: int, children: tuple[int, ...]) -> NodeStep:
        if not children:
            return NodeStep(None, sample(whole[node + 1], stream.uniform()))
        assert proposal.q is not None
        return sampled_children(whole[node + 1], proposal.q[node + 1], children, stream, tokens=p.shape[1])

    outcome = accept_tree(proposal, step)
    return len(outcome.path), outcome.next_token, stream.taken


def test_the_ratio_rule_is_that_of_numpy() -> None:
    rng = np.random.default_rng(9)
    graph = session(ratio_graph(TOKENS))
    ends = dict.fromkeys(range(6), 0)
    for _ in range(RATIO_CASES):
        count = int(rng.integers(1, 6))
        p = rng.dirichlet(np.full(TOKENS, 0.3), count + 1)
        q = 0.7 * p[:count] + 0.3 * rng.dirichlet(np.full(TOKENS, 0.3), count)
        if rng.random() < 0.2:
            p[rng.integers(0, count + 1)] = np.eye(TOKENS)[rng.integers(0, TOKENS)]
        if rng.random() < 0.1:
            q[0] = p[0]
        p, q = p / p.sum(axis=1, keepdims=True), q / q.sum(axis=1, keepdims=True)
        drafts = [int(rng.choice(TOKENS, p=row)) for row in q]
        uniforms = rng.random(count + 1)
        expected = ratio_by_numpy(p, q, drafts, uniforms)
        inputs = {"p": p, "q": q, "drafts": np.array(drafts), "uniforms": uniforms, "places": np.arange(count)}
        got = tuple(int(value[0]) for value in graph.run(["accepted", "next", "used"], inputs))
        assert got == expected
        ends[expected[0]] += 1
    assert min(ends.values()) > RATIO_CASES // 500


def test_a_draw_from_a_large_vocabulary_goes_over_the_edges_of_its_blocks() -> None:
    rng = np.random.default_rng(10)
    for tokens in (255, 256, 257, 1000):
        graph = session(drawn_graph(tokens))
        logits = rng.normal(0, 1, (400, tokens)).astype(np.float32)
        uniforms = rng.random(400)
        uniforms[:2] = 0.0, 1 - 2.0**-53
        options = SamplingOptions(temperature=1.0, mode="rejection", seed=0)
        nothing = tree_inputs(Proposal((), "deterministic"))
        got = graph.run(
            ["choices"], {"logits": logits, "uniforms": uniforms, "inverse_temperature": np.ones(1), **nothing}
        )[0]
        expected = [
            sample(distribution(row, None, options, tokens=tokens), uniform)
            for row, uniform in zip(logits, uniforms, strict=True)
        ]
        assert got.tolist() == expected


def test_numbers_that_are_none_are_counted() -> None:
    logits = np.zeros((3, VOCABULARY), np.float32)
    logits[1, 4] = np.nan
    logits[2, 5] = np.inf
    nothing = tree_inputs(Proposal((), "deterministic"))
    _, peaks, odd, _, _ = session(greedy_graph(TOKENS)).run(None, {"logits": logits, **nothing})
    assert odd.tolist() == [0, 1, 0]
    assert peaks[2] == np.inf


def test_the_best_of_a_row_are_the_lowest_ids_among_equals() -> None:
    logits = np.array([[1, 3, 3, 2, 3, 0]], np.float32)
    values, ids = session(top_graph(5)).run(None, {"logits": logits, "k": np.array([3])})
    assert (values.tolist(), ids.tolist()) == ([[3, 3, 3]], [[1, 2, 4]])


@pytest.mark.parametrize(("dtype", "element"), [(np.float32, FLOAT), (np.float16, FLOAT16)])
def test_rows_are_copied_in_place_and_read_before_they_are_written(dtype: Any, element: int) -> None:
    graph = session(copy_graph(2, element))
    buffers = [np.arange(24, dtype=dtype).reshape(8, 3) + 100 * index for index in range(2)]
    before = [buffer.copy() for buffer in buffers]
    binding = graph.io_binding()
    kept = [onnxruntime.OrtValue.ortvalue_from_numpy(buffer) for buffer in buffers]
    for index, value in enumerate(kept):
        binding.bind_ortvalue_input(f"from.{index}", value)
        binding.bind_ortvalue_input(f"to.{index}", value)
        binding.bind_ortvalue_output(f"out.{index}", value)
    binding.bind_cpu_input("source", np.array([3, 1, 6]))
    binding.bind_cpu_input("target", np.array([[1], [2], [3]]))
    graph.run_with_iobinding(binding)
    for old, new in zip(before, buffers, strict=True):
        expected = old.copy()
        expected[[1, 2, 3]] = old[[3, 1, 6]]
        assert np.array_equal(new, expected)
