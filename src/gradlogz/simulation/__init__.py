"""Simulations with names, theory beside them, and a page of each.

simulate        a preset or a cloud, run and looked at; Simulation
sweep           a grid of parameters, each place with its verdict; Phases
"""

from .parameter_sweep import Phases, sweep
from .run_simulation import Simulation, simulate

__all__ = ["simulate", "Simulation", "sweep", "Phases"]
