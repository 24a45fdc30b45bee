"""Which weights and which attention does a language model need? Plan: plan.md."""
