"""Filters and smoothers of Gaussian states: GPB1, GPB2, IMM, enumeration, particles, consistency."""
