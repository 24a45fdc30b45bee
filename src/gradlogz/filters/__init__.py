"""Filters of systems that switch between modes.

SwitchingModel      k linear Gaussian systems and the chain that switches them; KalmanModel, one of them
constant_velocity   the usual models of motion; random_walk, constant_acceleration, singer, coordinated_turn
NonlinearModel      the same with functions, by EKF or UKF; NonlinearMode, one of them
unknown_turn        a turn as a function, follow_drift; range_bearing, range_bearing_elevation, sensors; wrap_angles
imm                 the interacting multiple model filter; gpb1, gpb2, gpb, its relatives; Filtered, what they find
SwitchingFilter     the same one observation at a time; State, what is carried on
exact               every history of modes; Exact
rao_blackwell       histories that are drawn; Sampled
smooth              what later observations say of earlier states; Smoothed
fit                 parameters from series; Fitted
ConjugateFilter     the same for other families than Gaussians, such as GammaPoisson; Discount, Reset, LinearMotion
AttentionFilter     softmax attention as one of them, with the covariance it drops; Slots, attentive_imm, linear_link
normalized_innovation   whether a filter is what it claims; nees, gate, Consistency
"""

from .conjugate.attention_filter import (
    AttentionFilter,
    Collapsed,
    Coupling,
    LinearLink,
    Slots,
    attentive_imm,
    linear_link,
)
from .conjugate.conjugate_dynamics import Closure, Discount, LinearMotion, Reset, closed
from .conjugate.conjugate_filter import ConjugateFilter, ConjugateFiltered, ConjugateState
from .conjugate.families import (
    BetaBinomial,
    ConjugateFamily,
    DirichletMultinomial,
    GammaExponential,
    GammaPoisson,
    InverseWishartNormal,
    LinearGaussian,
)
from .fitting.learning import Fitted, fit
from .gaussian.consistency import Consistency, gate, nees, normalized_innovation
from .gaussian.enumeration import Exact, exact
from .gaussian.particle import Sampled, rao_blackwell
from .gaussian.results import Filtered, State
from .gaussian.smoother import Smoothed, smooth
from .gaussian.switching import SwitchingFilter, gpb, gpb1, gpb2, imm
from .models.discretization import discretize, discretize_chain
from .models.linear_motion import constant_acceleration, constant_velocity, coordinated_turn, random_walk, singer
from .models.nonlinear_model import NonlinearMode, NonlinearModel
from .models.nonlinear_motion import follow_drift, range_bearing, range_bearing_elevation, unknown_turn, wrap_angles
from .models.switching_model import KalmanModel, SwitchingModel

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
    "NonlinearModel",
    "NonlinearMode",
    "unknown_turn",
    "follow_drift",
    "range_bearing",
    "range_bearing_elevation",
    "wrap_angles",
    "gpb1",
    "gpb2",
    "imm",
    "gpb",
    "SwitchingFilter",
    "Filtered",
    "State",
    "exact",
    "Exact",
    "smooth",
    "Smoothed",
    "rao_blackwell",
    "Sampled",
    "fit",
    "Fitted",
    "ConjugateFilter",
    "ConjugateFiltered",
    "ConjugateState",
    "ConjugateFamily",
    "GammaPoisson",
    "GammaExponential",
    "BetaBinomial",
    "DirichletMultinomial",
    "InverseWishartNormal",
    "LinearGaussian",
    "Discount",
    "Reset",
    "LinearMotion",
    "closed",
    "Closure",
    "AttentionFilter",
    "Slots",
    "Collapsed",
    "Coupling",
    "attentive_imm",
    "linear_link",
    "LinearLink",
    "normalized_innovation",
    "nees",
    "gate",
    "Consistency",
]
