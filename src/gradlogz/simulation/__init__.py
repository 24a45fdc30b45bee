"""Simulations of token clouds under repeated attention, compared with theory.

simulate        run a preset or a custom cloud and record observables; returns a Simulation
sweep           run every point of a parameter grid; returns Phases, a phase diagram
"""

from .run_simulation import simulate as simulate
from .records import Simulation as Simulation
from .parameter_sweep import sweep as sweep
from .records import Phases as Phases
