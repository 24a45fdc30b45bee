"""Numerical checks of the statements of the theory."""
