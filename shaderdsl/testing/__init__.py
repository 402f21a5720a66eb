"""Checks for one's own ops: shapes, strides, dtypes and values drawn by Hypothesis.

Needs ``pip install shaderdsl[testing]``. ``check_op`` compares an op's values with a
NumPy reference in float64 and its gradients with the reference's finite differences;
a failure is shrunk and printed as a script that repeats it.
"""

from __future__ import annotations

from .check import Tolerance, check_case, check_op
from .gradients import Graph, check_gradients, differences
from .strategies import Case, cases, dims
from .values import KINDS, LAYOUTS, make

__all__ = [
    "KINDS",
    "LAYOUTS",
    "Case",
    "Graph",
    "Tolerance",
    "cases",
    "check_case",
    "check_gradients",
    "check_op",
    "differences",
    "dims",
    "make",
]
