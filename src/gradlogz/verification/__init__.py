"""Checks of every statement of the theory that can be computed."""
