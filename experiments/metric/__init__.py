"""Is the learned QK matrix the Fisher information? Plan: plan.md."""
