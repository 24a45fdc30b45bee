"""Which contraction of the residual stream, at which size of the data? Plan: plan.md."""
