"""The examples are scripts beside each other, not a package: their folder goes on the import path."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
