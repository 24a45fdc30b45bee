"""Free against tied value maps: does ascent depend on the objective or on the architecture? Plan: plan.md."""
