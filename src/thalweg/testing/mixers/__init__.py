"""The battery of mixers, for those of this package and for yours.

from thalweg.testing import check_mixer
check_mixer(MyMixer)
"""

from thalweg.testing.mixers.battery import CHECKS, check_mixer

__all__ = ["CHECKS", "check_mixer"]
