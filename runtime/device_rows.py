"""Rows of logits that stay on the device, and what is decided there.

Under greedy decoding a round moves a few integers: the choice of each row, which nodes stand, and the token behind
them. With top-k the best of each row come to the host, and else the rows themselves, when they are looked at.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from specrun.models_cache.errors import BackendError
from specrun.runtime.backend import create_session
from specrun.runtime.device import Device
from specrun.runtime.device_buffers import DeviceBuffer, DeviceBuffers, run_bound
from specrun.runtime.device_graphs import drawn_graph, greedy_graph, top_graph
from specrun.runtime.proposal import Proposal

SPARE: Final = 64  # candidates beyond k: all that tie with the k-th must be among them
_GRAPHS: Final = {"greedy": greedy_graph, "drawn": drawn_graph, "top": top_graph}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the device decided: the nodes that stand, from a child of the root on, and the target's choice of each row.

    The token behind the last of them is `next_token`.
    """

    path: tuple[int, ...]
    choices: tuple[int, ...]
    next_token: int


class DeviceLogits:
    """Logits f32 [rows, V] on the device. An index gives a row of them on the host, a slice some of the rows."""

    def __init__(self, buffers: DeviceBuffers, device: Device, buffer: DeviceBuffer, first: int, rows: int) -> None:
        self._buffers, self._device, self._buffer = buffers, device, buffer
        self._first, self._rows = first, rows
        self._copied: list[NDArray[np.float32]] | None = []  # the whole buffer, once it was looked at

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, V)."""
        return self._rows, self._buffer.shape[-1]

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, slice):
            start, stop, step = key.indices(self._rows)
            if step != 1:
                raise ValueError("rows on a device are taken one after another")
            part = DeviceLogits(self._buffers, self._device, self._buffer, self._first + start, max(0, stop - start))
            part._copied = self._copied
            return part
        return np.asarray(self)[key]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if not self._copied:
            self._copied = [] if self._copied is None else self._copied
            self._copied.append(self._buffers.read(self._buffer).reshape(-1, self._buffer.shape[-1]))
        rows = self._copied[0][self._first : self._first + self._rows]
        return np.array(rows, dtype, copy=copy)

    def copy(self) -> NDArray[np.float32]:
        """A copy on the host."""
        return np.array(self)

    def greedy(self, proposal: Proposal, tokens: int) -> Verdict:
        """Judge a proposal by the greedy rule (`device_graphs.greedy_graph`). Raises BackendError as sampling does."""
        return self._judge("greedy", proposal, tokens, {})

    def drawn(self, proposal: Proposal, tokens: int, temperature: float, uniforms: NDArray[np.float64]) -> Verdict:
        """By the point-mass rule of the rejection mode; uniforms: of each depth, the root's first."""
        inputs = tree_inputs(proposal)
        depths = np.concatenate([[0], inputs["ancestors"].sum(axis=1)]).astype(np.int64)
        extra = {"inverse_temperature": np.array([1.0 / temperature]), "uniforms": uniforms[depths]}
        return self._judge("drawn", proposal, tokens, extra)

    def best(self, k: int, tokens: int) -> NDArray[np.float32]:
        """Logits f32 [rows, tokens] on the host: of each row the k best and what ties with the k-th, -inf elsewhere.

        The provider promises nothing on which of equals it takes, so where those that tie may be more than came, the
        whole row does.
        """
        count = min(k + SPARE, tokens)
        values, ids = self._run("top", tokens, {"k": np.array([count])}, ("values", "ids"))
        rows = np.full((self._rows, tokens), -np.inf, np.float32)
        np.put_along_axis(rows, ids, values, axis=1)
        for row in np.flatnonzero(~(values[:, -1] < values[:, k - 1])):  # so too for logits that are not numbers
            if count < tokens:
                rows[row] = self[int(row)][:tokens]
        return rows

    def _judge(self, graph: str, proposal: Proposal, tokens: int, extra: dict[str, NDArray[Any]]) -> Verdict:
        names = ("choices", "taken", "next", "peaks", "odd")
        choices, taken, following, peaks, odd = self._run(graph, tokens, tree_inputs(proposal) | extra, names)
        path = tuple(np.flatnonzero(taken).tolist())
        reached = [0, *[node + 1 for node in path]]
        _check(peaks[reached], odd[reached])
        return Verdict(path, tuple(choices.tolist()), int(following[0]))

    def _run(
        self, graph: str, tokens: int, inputs: dict[str, NDArray[Any]], names: tuple[str, ...]
    ) -> list[NDArray[Any]]:
        session = judge_session(self._device, graph, tokens)
        binding = session.io_binding()
        width = self._buffer.shape[-1]
        start = self._first * width
        rows = DeviceBuffer(self._buffer.owner, self._buffer.pointer + 4 * start, (self._rows, width), "float32", start)
        self._buffers.bind_input(binding, "logits", rows)
        for name, array in inputs.items():
            binding.bind_cpu_input(name, np.ascontiguousarray(array))
        for name in names:
            binding.bind_output(name)  # on the host: a few numbers
        run_bound(session, binding, "judging a proposal")
        return list(binding.copy_outputs_to_cpu())

    @classmethod
    def of_batch(cls, buffers: DeviceBuffers, device: Device, buffer: DeviceBuffer, rows: int) -> list[DeviceLogits]:
        """The first `rows` of each row of a batch, of logits f32 [batch, n, V]; one copy to the host serves all."""
        batch, most, _ = buffer.shape
        found = [cls(buffers, device, buffer, row * most, rows) for row in range(batch)]
        for one in found:
            one._copied = found[0]._copied
        return found


Logits = NDArray[np.float32] | DeviceLogits


def tree_inputs(proposal: Proposal) -> dict[str, NDArray[Any]]:
    """The inputs of `greedy_graph` and `drawn_graph` that say what was proposed."""
    count = len(proposal)
    parents = np.arange(-1, count - 1) if proposal.parents is None else np.array(proposal.parents, np.int64)
    ancestors = np.eye(count, dtype=np.float32)
    for node, parent in enumerate(parents.tolist()):
        if parent >= 0:
            ancestors[node] += ancestors[parent]
    return {
        "drafts": np.array(proposal.tokens, np.int64),
        "parents": parents.astype(np.int64) + 1,
        "ancestors": ancestors,
        "places": np.arange(1, count + 1, dtype=np.int64),
    }


@functools.lru_cache(maxsize=16)
def judge_session(device: Device, graph: str, tokens: int) -> Any:
    """The session of one of the small graphs for so many tokens, shared by all engines."""
    return create_session(_GRAPHS[graph](tokens), threads=1, device=device)


def _check(peaks: NDArray[np.float32], odd: NDArray[np.int64]) -> None:
    """Refuse logits that are not numbers, as `sampling` does for rows on the host."""
    if odd.any() or not np.isfinite(peaks).all():
        raise BackendError("The graph gave logits that are not numbers: export it again in a higher precision.")
