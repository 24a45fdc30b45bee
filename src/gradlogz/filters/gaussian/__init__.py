"""Filters and smoothers for Gaussian states: GPB1, GPB2, IMM, enumeration, particles, consistency."""
