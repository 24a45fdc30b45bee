"""Interventions on a model: parts of its passes replaced, and the change of its loss."""
