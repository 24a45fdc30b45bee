"""Models: switching linear systems, nonlinear systems for EKF and UKF, motion models, discretization."""
