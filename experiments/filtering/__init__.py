"""Does a transformer that predicts the next observation learn the IMM filter? Plan: plan.md."""
