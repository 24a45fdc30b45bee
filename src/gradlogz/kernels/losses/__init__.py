"""Log-sum-exp over all pairs of rows: the sum of every contrastive loss, in memory linear in the rows."""
