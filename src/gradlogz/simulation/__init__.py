"""Simulations with names, theory beside them, and a page of each.

simulate        a preset or a cloud, run and looked at; Simulation
sweep           a grid of parameters, each place with its verdict; Phases
"""

from .running import Simulation, simulate
from .sweeping import Phases, sweep

__all__ = ["simulate", "Simulation", "sweep", "Phases"]
