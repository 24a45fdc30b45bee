"""Filters for conjugate families other than Gaussians, and softmax attention as a filter."""
