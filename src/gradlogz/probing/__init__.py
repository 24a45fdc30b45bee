"""Real transformers, measured: which claims of the theory a trained model obeys."""
