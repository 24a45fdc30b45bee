"""Do networks of this package have published numbers? Plan: plan.md."""
