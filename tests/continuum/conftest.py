"""Makes ``probe_subjects``, and the tiny families of the capture tests, importable for the tests beside it.

Test modules are imported by path and have no package.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "capture"))
