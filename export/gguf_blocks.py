"""The exact quantised form of GGUF tensors, in the terms that MatMulNBits computes in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Blocks:
    """A quantised matrix: w[n, k] = scales[n, k // block] * (codes[n, k] - 2**(bits - 1)) + offsets[n, k // block].

    `codes` uint8 [N, K], one a byte; `scales` float32 [N, K / block]; `offsets` likewise, None where zero by
    construction. `bits` (4 or 8) is the MatMulNBits storage that holds the codes exactly; `type_name` is the GGUF type.
    """

    type_name: str
    bits: int
    block: int
    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32] | None
