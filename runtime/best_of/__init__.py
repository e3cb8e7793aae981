"""Best of N: samples of one prompt, and the scores that choose among them."""

from specrun.runtime.best_of.candidates import Candidate, Score
from specrun.runtime.best_of.result import BestOfMemory, BestOfResult, BestOfTimings

__all__ = ["BestOfMemory", "BestOfResult", "BestOfTimings", "Candidate", "Score"]
