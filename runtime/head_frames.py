"""The inputs and outputs of one width of a head's graph, bound once and rewritten in place."""

from __future__ import annotations

from typing import Any, Final

from numpy.typing import NDArray

from specrun.runtime.device_buffers import Buffers
from specrun.runtime.kv_cache import KVCache

_KV_TYPES: Final = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(bfloat16)": "bfloat16"}

Output = tuple[tuple[int, ...], str]  # shape and type


class HeadFrame:
    """The inputs and outputs of one width, bound once."""

    def __init__(
        self,
        session: Any,
        buffers: Buffers,
        inputs: dict[str, NDArray[Any]],
        outputs: dict[str, Output],
        shared: dict[str, Any],
    ) -> None:
        """shared: values that are bound as they are, by the name of the input or output."""
        self.inputs = inputs
        self.binding = session.io_binding()
        self._buffers = buffers
        self._planted = False
        self._values: dict[str, Any] = {}
        self._outputs = {name: buffers.output(*output) for name, output in outputs.items()}
        wanted = {value.name for value in session.get_inputs()}
        for name, array in inputs.items():
            self._values[name] = buffers.input(name, array)
            buffers.bind_input(self.binding, name, self._values[name])
        for name, buffer in self._outputs.items():
            self._values[name] = buffers.value(buffer)
            buffers.bind_output(self.binding, name, self._values[name])
        for name, value in shared.items():
            (buffers.bind_input if name in wanted else buffers.bind_output)(self.binding, name, value)

    def run(self, session: Any, *, noisy: bool, planted: bool) -> None:
        """Run the graph on what the inputs now hold. noisy, planted: whether noise and bias are other than zeros.

        These two are large, so they are sent only where they changed.
        """
        unchanged = {"noise"} if not noisy else set()
        if not planted and not self._planted:
            unchanged.add("attention_bias")
        self._planted = planted
        sent = {name: array for name, array in self.inputs.items() if name not in unchanged}
        self._buffers.send(self._values, sent)
        session.run_with_iobinding(self.binding)

    def read(self, name: str) -> NDArray[Any]:
        """An output of the last run, on the host."""
        return self._buffers.read(self._outputs[name])


def head_cache(session: Any, buffers: Buffers, kv_heads: int, head_dim: int, positions: int) -> KVCache:
    """Empty buffers of the one layer of a head's graph, of the type that it has, for at most so many positions."""
    types = {value.name: value.type for value in session.get_inputs()}
    return KVCache(
        layers=1,
        kv_heads=kv_heads,
        head_dim=head_dim,
        capacity=1,
        limit=positions,
        dtype=_KV_TYPES[types["past_key"]],
        buffers=buffers,
    )
