"""What an engine has for best-of-N."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Unpack, cast

from specrun.runtime.request import RequestOptions

if TYPE_CHECKING:  # few programs need them
    from specrun.runtime.best_of.candidates import Candidate, Score
    from specrun.runtime.best_of.prefix_graph import PrefixGraph
    from specrun.runtime.best_of.result import BestOfResult
    from specrun.runtime.best_of.run import Progress
    from specrun.runtime.engine import Engine, Prompt


class BestOfCalls:
    """The part of an `Engine` that samples one prompt many times and chooses."""

    _prefix_graph: PrefixGraph | None = None

    def best_of(
        self,
        prompt: Prompt,
        *,
        n: int = 16,
        score: Score | None = None,
        prune: bool = False,
        budget_tokens: int | None = None,
        budget_s: float | None = None,
        certainties: bool = False,
        right: Callable[[Candidate], bool] | None = None,
        progress: Callable[[Progress], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> BestOfResult:
        """Write n samples of one prompt together, which is read and stored once, and choose the best by a score.

        score          by default the mean log-probability of the tokens
        prune          end samples that cannot win any more, where the score can tell
        budget_tokens  about so many tokens of all samples together, and budget_s seconds: then all end where they are
        certainties    have them in the candidates, whatever the score
        right          the label of a candidate, for `pass_at_k`
        progress       is told before each round

        The options are those of `RequestOptions`; the temperature is 0.8 unless one is given. Sample i has the text
        that `sample_index` i has by plain decoding of the same graph, whatever n, the method and K. Raises UsageError
        for a model without that graph, what `generate` raises, and what the score does.
        """
        from specrun.runtime.best_of.run import BestOf

        return BestOf(
            cast("Engine", self),
            prompt,
            options,
            n=n,
            score=score,
            prune=prune,
            budget_tokens=budget_tokens,
            budget_s=budget_s,
            certainties=certainties,
            right=right,
            progress=progress,
        ).run()

    async def abest_of(self, prompt: Prompt, **arguments: Any) -> BestOfResult:
        """As `best_of`, for `await`; cancelling the task ends the samples after the round that runs."""
        import asyncio
        from concurrent.futures import Future

        from specrun.runtime.best_of.run import BestOf, split_arguments

        engine = cast("Engine", self)
        options, own = split_arguments(arguments)
        found: Future[BestOfResult] = Future()
        best = BestOf(engine, prompt, options, **own)

        def work() -> None:
            if not found.set_running_or_notify_cancel():
                return
            try:
                found.set_result(best.run())
            except BaseException as error:
                found.set_exception(error)

        engine.worker.submit(work)
        try:
            return await asyncio.shield(asyncio.wrap_future(found))
        except asyncio.CancelledError:
            best.cancel()
            raise

    def prefix_graph(self) -> PrefixGraph:
        """The graph for rows behind one prompt, opened by the first call; for whoever holds the engine."""
        if self._prefix_graph is None:
            from specrun.runtime.best_of.prefix_graph import PrefixGraph

            engine = cast("Engine", self)
            self._prefix_graph = PrefixGraph(engine.bundle, engine.threads, engine.device)
        return self._prefix_graph

    def close_prefix_graph(self) -> None:
        """Free it."""
        if self._prefix_graph is not None:
            self._prefix_graph.close()
            self._prefix_graph = None
