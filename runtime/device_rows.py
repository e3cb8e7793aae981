"""stub"""

from __future__ import annotations
from typing import Any
import numpy as np
from numpy.typing import NDArray
from specrun.runtime.proposal import Proposal


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
