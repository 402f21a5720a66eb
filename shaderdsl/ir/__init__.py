"""What is computed: expressions, stages, derivatives, an interpreter. Needs NumPy
alone.
"""

from . import primitives as primitives  # `expr` applies its rows
