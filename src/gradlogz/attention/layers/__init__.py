"""Attention layers with parameters, one file each.

MultiheadAttention   that of torch.nn, with the statistics of every head
MomentAttention      mean and covariance of each token, in and out
MixtureAttention     keys are Gaussians with learned covariances
GatedHeads           a mixture of heads, gated by their log normalisers
LinkAttention        queries are natural parameters of a chosen family
LinearAttention      weights are products of features: a state of fixed size
SigmoidAttention     a sigmoid for each key instead of a softmax
CosineAttention      softmax attention on the sphere

MultiheadAttention has the arguments of torch.nn; the others take tokens [*b, n, d] and the masks of `attend`.
"""
