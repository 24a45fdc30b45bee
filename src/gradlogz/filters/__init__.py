"""Filters of systems that switch between modes.

SwitchingModel      k linear Gaussian systems and the chain that switches them; KalmanModel, one of them
constant_velocity   the usual models of motion; random_walk, constant_acceleration, singer, coordinated_turn
imm                 the interacting multiple model filter; gpb1, gpb2, gpb, its relatives; Filtered, what they find
SwitchingFilter     the same one observation at a time; State, what is carried on
exact               every history of modes; Exact
normalized_innovation   whether a filter is what it claims; nees, gate, Consistency
"""

from .consistency import Consistency, gate, nees, normalized_innovation
from .discretization import discretize, discretize_chain
from .enumeration import Exact, exact
from .model import KalmanModel, SwitchingModel
from .motion import constant_acceleration, constant_velocity, coordinated_turn, random_walk, singer
from .result import Filtered, State
from .switching import SwitchingFilter, gpb, gpb1, gpb2, imm

__all__ = [
    "SwitchingModel",
    "KalmanModel",
    "random_walk",
    "constant_velocity",
    "constant_acceleration",
    "singer",
    "coordinated_turn",
    "discretize",
    "discretize_chain",
    "gpb1",
    "gpb2",
    "imm",
    "gpb",
    "SwitchingFilter",
    "Filtered",
    "State",
    "exact",
    "Exact",
    "normalized_innovation",
    "nees",
    "gate",
    "Consistency",
]
