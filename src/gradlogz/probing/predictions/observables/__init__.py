"""Quantities of a batch that several predictions share: attention rows, moments, distances."""
