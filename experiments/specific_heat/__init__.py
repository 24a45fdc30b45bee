"""Does the variance of attention logits peak before a model generalises? Plan: plan.md."""
