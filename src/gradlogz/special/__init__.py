"""Special functions and quantiles of distributions, each written once: gamma, digamma, Bessel, pseudo-inverse."""
