"""The mixer battery's own test: what can be wrong with a mixer, each as a small change to a module, and the checks that must reject it.

A battery that lets one of these through is itself broken.
"""

from thalweg.testing.mixers.mutants import declarations, matrix, numerics
from thalweg.testing.mixers.mutants.catalog import MUTANTS

__all__ = ["MUTANTS", "declarations", "matrix", "numerics"]
