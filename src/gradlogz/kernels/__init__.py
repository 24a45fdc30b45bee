"""Sums over points: the only place where a backend is chosen."""
