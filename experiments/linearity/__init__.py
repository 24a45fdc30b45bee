"""Affine feed-forward layers, closed forms of heads and a Gaussian stream, through training. Plan: plan.md."""
