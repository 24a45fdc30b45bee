"""Layers: attention with parameters, one file each.

MultiheadAttention   torch.nn's, with the statistics of every head
MomentAttention      tokens carry mean and covariance, and get both
MixtureAttention     keys are Gaussians with learned covariances
GatedHeads           heads are a mixture, gated by their log normalisers
LinkAttention        queries are natural parameters of a chosen family

All but the first, which speaks torch.nn's language, take tokens [*b, n, d] and the masks of `attend`.
"""
