"""Proposers: each guesses draft tokens and re-synchronises, nothing else."""
