"""Models: switching linear systems, functions for EKF and UKF, models of motion, discretization."""
