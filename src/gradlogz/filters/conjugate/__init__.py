"""Filters of other conjugate families than Gaussians, and softmax attention as one of them."""
