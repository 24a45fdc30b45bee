"""Simulations with names, and theory beside them.

simulate        a preset or a cloud, run and looked at; Simulation
sweep           a grid of parameters, each point with its verdict; Phases
"""

from .run_simulation import simulate as simulate
from .records import Simulation as Simulation
from .parameter_sweep import sweep as sweep
from .records import Phases as Phases
