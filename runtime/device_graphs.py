"""Small graphs that run where the target runs, so that its logits and its KV buffers need not come to the host.

They are built here, with nothing but `onnx_writer`, and are the same for every model: sizes are symbolic, or given.
All of them run on the CPU provider too, where tests hold them to the numpy rules of `acceptance` and `sampling`.

Why noise is not made on the device: the coupled noise is Philox4x64, which needs exclusive or and shifts of 64-bit
words, and the CUDA provider has kernels for neither (1.31, 1.32). A row of noise has eight bytes a token and a row of
logits four, so under coupled sampling it is the logits that travel. Greedy choices and the point-mass rule of the
rejection mode run on the device. The graph of the ratio rule is not used yet: the distributions that it compares, those
of target and draft, are made on the host.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from specrun.runtime.onnx_writer import BOOL, DOUBLE, FLOAT, INT64, GraphWriter

BLOCK: Final = 256  # the CUDA provider's cumulative sum takes time quadratic in its length, so it goes in two levels


def copy_graph(buffers: int, element: int) -> bytes:
    """Rows of some buffers into rows of others, or of the same ones.

    in   from.i, to.i  [rows, width] of the ONNX type `element`, for i < `buffers`; they may be the same memory
         source        i64 [n]: the rows to read
         target        i64 [n, 1]: the rows to write; no two may be equal
    out  out.i         to be bound to the memory of to.i, so that only the rows named are written

    All rows are read before one is written: source and target may overlap.
    """
    g = GraphWriter("copy")
    source, target = g.input("source", INT64, ["n"]), g.input("target", INT64, ["n", 1])
    for index in range(buffers):
        from_rows = g.input(f"from.{index}", element, ["from_rows", "width"])
        to_rows = g.input(f"to.{index}", element, ["to_rows", "width"])
        picked = g.op("Gather", from_rows, source, axis=0)
        out = g.op("ScatterND", to_rows, target, picked, out=f"out.{index}")
        g.output(out, element, ["to_rows", "width"])
    return g.model()


def greedy_graph(tokens: int) -> bytes:
    """The greedy rule over a proposal (`acceptance.choose_child` and `accept_tree`).

    in   logits     f32 [rows, V]; ids from `tokens` on are padding of the vocabulary
         drafts     i64 [nodes], nodes = rows - 1, or 0 for the choices alone
         parents    i64 [nodes]: the row of each node's parent, that is `Proposal.parents` + 1
         ancestors  f32 [nodes, nodes]: 1 where a column is the row's node or an ancestor of it
         places     i64 [nodes]: 1, 2, ..
    out  choices    i64 [rows]: the most probable id of each row, the lowest on ties
         peaks      f32 [rows]: its logit
         odd        i64 [rows]: how many of the row's logits are not numbers
         taken      i64 [nodes]: 1 for the nodes that the target goes through
         next       i64 [1]: its choice behind the last of them
    """
    g = GraphWriter("greedy")
    real = _real_logits(g, tokens)
    peak = g.op("ReduceMax", real, g.constant("one", [1]), keepdims=1)
    _first_equal(g, real, peak, tokens)
    _peaks(g, real, peak)
    _walk(g)
    return g.model()


def drawn_graph(tokens: int) -> bytes:
    """The point-mass rule of the rejection mode: as `greedy_graph`, with the choice of a row drawn from its softmax.

    Besides the inputs there: inverse_temperature f64 [1]; uniforms f64 [rows] in [0, 1): that of the row at depth d is
    the d-th of the request's stream. Ids are taken as `sampling.sample` takes them from `sampling.distribution`
    without penalties or filters.
    """
    g = GraphWriter("drawn")
    real = _real_logits(g, tokens)
    one = g.constant("one", [1])
    peak = g.op("ReduceMax", real, one, keepdims=1)
    wide = g.op("Sub", g.op("Cast", real, to=DOUBLE), g.op("Cast", peak, to=DOUBLE))
    weights = g.op("Exp", g.op("Mul", wide, g.input("inverse_temperature", DOUBLE, [1])))
    uniforms = g.op("Unsqueeze", g.input("uniforms", DOUBLE, ["rows"]), one)
    g.op("Identity", _drawn(g, weights, uniforms, tokens), out="choices")
    g.output("choices", INT64, ["rows"])
    _peaks(g, real, peak)
    _walk(g)
    return g.model()


def ratio_graph(tokens: int) -> bytes:
    """The ratio rule over a chain whose tokens were drawn from q (`acceptance.sampled_children` at every node).

    in   p         f64 [drafts + 1, tokens]: the target's distribution of each row
         q         f64 [drafts, tokens]: what each draft token was drawn from
         drafts    i64 [drafts], at least one
         uniforms  f64 [drafts + 1] in [0, 1), in the order in which the request's stream gives them
         places    i64 [drafts]: 0, 1, ..
    out  accepted  i64 [1]: how many draft tokens stand, the first ones
         next      i64 [1]: the correction or bonus behind them
         used      i64 [1]: how many of the uniforms count as drawn
    """
    g = GraphWriter("ratio")
    zero, one = g.constant("zero", [0]), g.constant("one", [1])
    p = g.input("p", DOUBLE, ["rows", tokens])
    q = g.input("q", DOUBLE, ["drafts", tokens])
    drafts = g.input("drafts", INT64, ["drafts"])
    uniforms = g.input("uniforms", DOUBLE, ["rows"])
    places = g.input("places", INT64, ["drafts"])
    count = g.op("Shape", drafts)
    heads = g.op("Slice", p, zero, count, zero)
    column = g.op("Unsqueeze", drafts, one)
    p_of, q_of = (g.op("Squeeze", g.op("GatherElements", rows, column, axis=1), one) for rows in (heads, q))
    stands = g.op("Less", g.op("Mul", g.op("Slice", uniforms, zero, count, zero), q_of), p_of)
    # The first that does not stand; all of them where every one does.
    failed = g.op("Concat", g.op("Where", stands, count, places), count, axis=0)
    accepted = g.op("ReduceMin", failed, zero, keepdims=1, out="accepted")
    tests = g.op("Min", g.op("Add", accepted, one), count)
    g.op("Add", tests, one, out="used")
    row = g.op("Gather", p, accepted, axis=0)
    # A bonus has no q: a row of zeros stands behind the last one.
    none = g.constant("no_q", np.zeros((1, tokens)))
    taken_from = g.op("Gather", g.op("Concat", q, none, axis=0), accepted, axis=0)
    nothing = g.constant("nothing", np.zeros(1))
    rest = g.op("Max", g.op("Sub", row, taken_from), nothing)
    left = g.op("Greater", g.op("ReduceSum", rest, one, keepdims=1), nothing)
    uniform = g.op("Unsqueeze", g.op("Gather", uniforms, tests, axis=0), one)
    g.op("Identity", _drawn(g, g.op("Where", left, rest, row), uniform, tokens), out="next")
    for name in ("accepted", "next", "used"):
        g.output(name, INT64, [1])
    return g.model()


def top_graph(tokens: int) -> bytes:
    """The best of each row, for sampling under top-k: logits f32 [rows, V], k i64 [1] -> values f32, ids i64 [rows, k].

    Best first; which of equals is taken is up to the provider.
    """
    g = GraphWriter("top")
    real = _real_logits(g, tokens)
    g.op_multi("TopK", real, g.input("k", INT64, [1]), outs=("values", "ids"), axis=1)
    g.output("values", FLOAT, ["rows", "top"])
    g.output("ids", INT64, ["rows", "top"])
    return g.model()


def _real_logits(g: GraphWriter, tokens: int) -> str:
    """The logits [rows, tokens] of the ids that are tokens."""
    logits = g.input("logits", FLOAT, ["rows", "vocabulary"])
    one = g.constant("one", [1])
    return g.op("Slice", logits, g.constant("zero", [0]), g.constant("tokens", [tokens]), one)


def _first_equal(g: GraphWriter, real: str, peak: str, tokens: int) -> None:
    """choices: the lowest id of each row whose logit is the peak.

    Not by ArgMax, which promises nothing on the CUDA provider about ties, and logits of 16 bits tie often. The ids are
    float32, exact up to 2**24, as that provider compares integers no other way.
    """
    ids = g.constant("ids", np.arange(tokens, dtype=np.float32))
    beyond = g.constant("beyond", np.array([tokens], np.float32))
    best = g.op("ReduceMin", g.op("Where", g.op("Equal", real, peak), ids, beyond), g.constant("one", [1]), keepdims=0)
    g.op("Cast", best, to=INT64, out="choices")
    g.output("choices", INT64, ["rows"])


def _peaks(g: GraphWriter, real: str, peak: str) -> None:
    """peaks and odd: what `sampling` refuses a row by."""
    one = g.constant("one", [1])
    g.op("Squeeze", peak, one, out="peaks")
    odd = g.op("Cast", g.op("Not", g.op("Equal", real, real)), to=INT64)
    g.op("ReduceSum", odd, one, keepdims=0, out="odd")
    g.output("peaks", FLOAT, ["rows"])
    g.output("odd", INT64, ["rows"])


def _drawn(g: GraphWriter, weights: str, uniforms: str, tokens: int) -> str:
    """The ids i64 [rows] at uniforms f64 [rows, 1] of the cumulative weights f64 [rows, tokens] >= 0."""
    one, two = g.constant("one", [1]), g.constant("two", [2])
    spare = -tokens % BLOCK
    pads = g.constant("pads", [0, 0, 0, spare])
    blocks = g.constant("blocks", [0, -1, BLOCK])
    wide = g.op("Reshape", g.op("Pad", weights, pads), blocks)
    inner = g.op("CumSum", wide, g.constant("axis_two", np.array(2, np.int64)))
    sums = g.op("ReduceSum", wide, two, keepdims=0)
    before = g.op("CumSum", sums, g.constant("axis_one", np.array(1, np.int64)), exclusive=1)
    cumulative = g.op("Add", inner, g.op("Unsqueeze", before, two))
    flat = g.op("Reshape", cumulative, g.constant("flat", [0, -1]))
    width = tokens + spare
    total = g.op("Slice", flat, g.constant("end", [width - 1]), g.constant("width", [width]), one)
    passed = g.op("Cast", g.op("LessOrEqual", flat, g.op("Mul", uniforms, total)), to=INT64)
    at = g.op("ReduceSum", passed, one, keepdims=0)
    # Rounding may pass the end: the last id with any weight then.
    ids = g.constant("all_ids", np.arange(tokens, dtype=np.int64))
    some = g.op("Where", g.op("Greater", weights, g.constant("nothing", np.zeros(1))), ids, g.constant("zero", [0]))
    return g.op("Min", at, g.op("ReduceMax", some, one, keepdims=0))


def _walk(g: GraphWriter) -> None:
    """taken and next: the nodes whose token, and that of every ancestor, is the choice of the parent's row."""
    zero, one = g.constant("zero", [0]), g.constant("one", [1])
    drafts = g.input("drafts", INT64, ["nodes"])
    parents = g.input("parents", INT64, ["nodes"])
    ancestors = g.input("ancestors", FLOAT, ["nodes", "nodes"])
    places = g.input("places", INT64, ["nodes"])
    stands = g.op("Equal", drafts, g.op("Gather", "choices", parents, axis=0))
    misses = g.op("Unsqueeze", g.op("Cast", g.op("Not", stands), to=FLOAT), one)
    missed = g.op("Squeeze", g.op("MatMul", ancestors, misses), one)
    taken = g.op("Cast", g.op("Equal", missed, g.constant("no_miss", np.zeros(1, np.float32))), to=INT64, out="taken")
    deepest = g.op("Concat", g.op("Mul", taken, places), zero, axis=0)
    g.op("Gather", "choices", g.op("ReduceMax", deepest, zero, keepdims=1), axis=0, out="next")
    g.output("taken", INT64, ["nodes"])
    g.output("next", INT64, [1])


__all__ = ["BOOL", "copy_graph", "drawn_graph", "greedy_graph", "ratio_graph", "top_graph"]
