"""Attention inside existing models: interception, observation, monitoring, Hugging Face."""
