"""The standard battery, for the connections of this package and for yours.

from thalweg.testing import check_connection
check_connection(MyConnection)
"""

from thalweg.testing.battery import CHECKS, BatteryReport, CheckResult, check_connection

__all__ = ["CHECKS", "BatteryReport", "CheckResult", "check_connection"]
