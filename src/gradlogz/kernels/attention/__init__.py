"""Attention with all statistics of its rows: the definition, the kernels, and the choice between them."""
