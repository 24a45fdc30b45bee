"""Attention inside somebody else's model: interception, observation, monitoring, Hugging Face."""
