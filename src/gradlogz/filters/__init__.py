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

from .models.switching_model import (
    SwitchingModel as SwitchingModel,
    KalmanModel as KalmanModel,
    Generator as Generator,
)
from .models.linear_motion import (
    random_walk as random_walk,
    constant_velocity as constant_velocity,
    constant_acceleration as constant_acceleration,
    singer as singer,
    coordinated_turn as coordinated_turn,
)
from .models.discretization import discretize as discretize, discretize_chain as discretize_chain
from .models.nonlinear_model import NonlinearModel as NonlinearModel, NonlinearMode as NonlinearMode
from .models.nonlinear_motion import (
    unknown_turn as unknown_turn,
    follow_drift as follow_drift,
    range_bearing as range_bearing,
    range_bearing_elevation as range_bearing_elevation,
    wrap_angles as wrap_angles,
)
from .prior_and_series import Prior as Prior, Series as Series
from .gaussian.switching import gpb1 as gpb1, gpb2 as gpb2, imm as imm, gpb as gpb, SwitchingFilter as SwitchingFilter
from .results import Filtered as Filtered, FilterState as FilterState
from .gaussian.enumeration import enumerate_modes as enumerate_modes, Enumerated as Enumerated
from .gaussian.smoother import smooth as smooth, Smoothed as Smoothed
from .gaussian.particle import rao_blackwell_filter as rao_blackwell_filter, Sampled as Sampled
from .fitting.learning import fit as fit, Fitted as Fitted
from .conjugate.conjugate_filter import (
    ConjugateFilter as ConjugateFilter,
    ConjugateFiltered as ConjugateFiltered,
    ConjugateState as ConjugateState,
)
from .conjugate.families import (
    ConjugateFamily as ConjugateFamily,
    GammaPoisson as GammaPoisson,
    GammaExponential as GammaExponential,
    BetaBinomial as BetaBinomial,
    DirichletMultinomial as DirichletMultinomial,
    InverseWishartNormal as InverseWishartNormal,
    LinearGaussian as LinearGaussian,
)
from .conjugate.conjugate_dynamics import (
    Discount as Discount,
    Reset as Reset,
    LinearMotion as LinearMotion,
    is_closed_under as is_closed_under,
    Closure as Closure,
)
from .conjugate.attention_filter import (
    AttentionFilter as AttentionFilter,
    Slots as Slots,
    Collapsed as Collapsed,
    Coupling as Coupling,
    attentive_imm as attentive_imm,
    linear_link as linear_link,
    LinearLink as LinearLink,
)
from .gaussian.consistency import (
    normalized_innovation as normalized_innovation,
    nees as nees,
    in_gate as in_gate,
    Consistency as Consistency,
)
