"""Inputs of a model: documents, batches of tokens, images and reaction SMILES."""
