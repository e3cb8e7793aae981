"""A bundle becomes tokens: sessions, KV caches, proposers, acceptance, the loop."""
