"""Entry of `python tests/bench/peers`: makes this folder importable as the package `peers`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from peers.command import main

sys.exit(main())
