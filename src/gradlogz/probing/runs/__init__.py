"""Findings of a probe as records, and their run folder on disk."""
