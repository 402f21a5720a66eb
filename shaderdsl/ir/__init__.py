"""What is computed: expressions, stages, derivatives, an interpreter. Needs NumPy
alone.
"""
