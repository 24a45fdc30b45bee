"""Fused sums over points and compiled filters: the only place where a compiled backend is chosen."""
