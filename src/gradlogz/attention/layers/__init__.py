"""Attention layers with parameters, one file each.

MultiheadAttention   that of torch.nn, with the statistics of every head
MomentAttention      mean and covariance of each token, in and out
MixtureAttention     keys are Gaussians with learned covariances
GatedHeads           a mixture of heads, gated by their log normalisers
LinkAttention        queries are natural parameters of a chosen family

MultiheadAttention has the arguments of torch.nn; the others take tokens [*b, n, d] and the masks of `attend`.
"""
