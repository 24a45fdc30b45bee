"""What a run leaves: records of values, judgements and declarations, findings, and the folder on disk."""
