"""Passes of batches through a model: placement, memory, interruption, statistics of a batch, extreme tokens."""
