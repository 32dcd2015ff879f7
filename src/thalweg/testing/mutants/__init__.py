"""The battery's own test: the bugs of the field, each as a small change to a stream, and the checks that must reject it.

A battery that lets one of these through is itself broken. Most are known from public code: streams mixed and then thrown away, a mixing
matrix applied transposed, a gate's bias overwritten by a later initialisation, a pooling that sees the future.
"""

from thalweg.testing.mutants import coefficients, declarations, flow, numerics, writing
from thalweg.testing.mutants.catalog import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "coefficients", "declarations", "flow", "numerics", "writing"]
