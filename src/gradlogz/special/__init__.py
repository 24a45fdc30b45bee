"""Special functions, each written once: gamma, digamma, Bessel, pseudo-inverse, distributions and their quantiles."""
