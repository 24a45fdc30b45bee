"""What a model reads: documents and batches of tokens, images, reaction SMILES."""
