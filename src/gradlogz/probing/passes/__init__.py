"""Batches through a model: placement, memory, interruption, statistics of a batch, tokens with extreme values."""
