"""The parts of `scripts/gpu_check`: what it measures, and how it keeps what it measured."""
