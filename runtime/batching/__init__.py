"""Rows of a batch: what runs them together, what a round costs, and how wide it is."""
