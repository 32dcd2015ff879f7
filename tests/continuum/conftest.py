"""Makes the tiny families of capture's tests importable; test modules are imported by path and have no package."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "capture")]
