"""Makes ``pages``, and the made-up plans of the tests of studies, importable for the tests beside it.

Test modules are imported by path and have no package.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "studies"))
