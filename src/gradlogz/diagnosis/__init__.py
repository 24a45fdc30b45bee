"""Diagnosis of a machine: versions, devices, and the kernels that serve calls on it."""
