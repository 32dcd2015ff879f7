"""Makes the tiny models of the tests of editing and capture importable; test modules are imported by path and have no package."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "editing"), str(HERE.parent / "capture")]
