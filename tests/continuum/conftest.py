"""Makes ``probe_subjects`` importable for the tests beside it; test modules are imported by path and have no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
