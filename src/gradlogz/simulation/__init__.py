"""Simulations with names, and theory beside them.

simulate        a preset or a cloud, run and looked at; Simulation
sweep           a grid of parameters, each point with its verdict; Phases
"""

from .parameter_sweep import sweep
from .records import Phases, Simulation
from .run_simulation import simulate

__all__ = ["simulate", "Simulation", "sweep", "Phases"]
