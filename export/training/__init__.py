"""Training of speculators: text that the target writes itself, features from its graph, heads in torch."""
