"""Does a layer that is trained as a deep equilibrium come to rest, and at an attractor of the theory? Plan: plan.md."""
