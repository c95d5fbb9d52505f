"""The solvers that several methods share: NumPy, float64, on the host."""
