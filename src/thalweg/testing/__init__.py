"""The standard batteries, for the connections and mixers of this package and for yours.

from thalweg.testing import check_connection, check_mixer
check_connection(MyConnection)
check_mixer(MyMixer)
"""

from thalweg.testing.battery import CHECKS, check_connection
from thalweg.testing.mixers.battery import check_mixer
from thalweg.testing.report import BatteryReport, CheckResult

__all__ = ["CHECKS", "BatteryReport", "CheckResult", "check_connection", "check_mixer"]
