"""Filters of systems that switch between modes.

SwitchingModel      k linear Gaussian systems and how modes switch; KalmanModel, one of them; Generator, continuous time
constant_velocity   the usual models of motion; random_walk, constant_acceleration, singer, coordinated_turn
NonlinearModel      the same with functions, by EKF or UKF; NonlinearMode, one of them
unknown_turn        a turn as a function, follow_drift; range_bearing, range_bearing_elevation, sensors; wrap_angles
Prior               initial mean, covariance and mode probabilities; Series, observations and what is known of them
imm                 the interacting multiple model filter; gpb1, gpb2, gpb, its relatives; Filtered, what they find
SwitchingFilter     the same one observation at a time; FilterState, what is carried on
enumerate_modes     every history of modes; Enumerated
rao_blackwell_filter   histories that are drawn; Sampled
smooth              what later observations say of earlier states; Smoothed
fit                 parameters from series; Fitted
ConjugateFilter     the same for other families than Gaussians, such as GammaPoisson; Discount, Reset, LinearMotion
AttentionFilter     softmax attention as one of them, with the covariance it drops; Slots, attentive_imm, linear_link
normalized_innovation   whether a filter is consistent; nees, in_gate, Consistency
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
from .conjugate.conjugate_dynamics import Closure, Discount, LinearMotion, Reset, is_closed_under
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
from .gaussian.consistency import Consistency, in_gate, nees, normalized_innovation
from .gaussian.enumeration import Enumerated, enumerate_modes
from .gaussian.particle import Sampled, rao_blackwell_filter
from .results import Filtered, FilterState
from .gaussian.smoother import Smoothed, smooth
from .gaussian.switching import SwitchingFilter, gpb, gpb1, gpb2, imm
from .models.discretization import discretize, discretize_chain
from .models.linear_motion import constant_acceleration, constant_velocity, coordinated_turn, random_walk, singer
from .models.nonlinear_model import NonlinearMode, NonlinearModel
from .models.nonlinear_motion import follow_drift, range_bearing, range_bearing_elevation, unknown_turn, wrap_angles
from .models.switching_model import Generator, KalmanModel, SwitchingModel
from .prior_and_series import Prior, Series

__all__ = [
    "SwitchingModel",
    "KalmanModel",
    "Generator",
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
    "Prior",
    "Series",
    "gpb1",
    "gpb2",
    "imm",
    "gpb",
    "SwitchingFilter",
    "Filtered",
    "FilterState",
    "enumerate_modes",
    "Enumerated",
    "smooth",
    "Smoothed",
    "rao_blackwell_filter",
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
    "is_closed_under",
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
    "in_gate",
    "Consistency",
]
