"""Distributions of tokens pushed through the layers of a model, and single layers in the form of the simulator."""
