"""Best of N: samples of one prompt, and the scores that choose among them."""

from specrun.runtime.best_of.candidates import Candidate, Score

__all__ = ["Candidate", "Score"]
