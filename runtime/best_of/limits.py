"""What holds for best-of-N where nothing else is said."""

from typing import Final

TEMPERATURE: Final = 0.8
"""Of requests that name none."""
MOST_SAMPLES: Final = 1024
MOST_ROWS: Final = 64
"""Samples that are decoded at a time; others wait for a free row."""
