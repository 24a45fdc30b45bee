"""Filters, smoothers and fitting for systems that switch between modes.

SwitchingModel      k linear Gaussian modes and their transition matrix or Generator; KalmanModel: one mode
constant_velocity   linear motion models; random_walk, constant_acceleration, singer, coordinated_turn
NonlinearModel      modes with functions in place of matrices, for EKF and UKF; NonlinearMode: one mode
unknown_turn        nonlinear motion, follow_drift; sensors range_bearing, range_bearing_elevation; wrap_angles
with_clutter        a model in which observations may be outliers; prior_with_clutter, without_clutter,
                    Clutter
Prior               initial mean, covariance and mode probabilities; Series: observations, mask, lengths, times, inputs
imm                 the interacting multiple model filter; gpb1, gpb2, gpb; Filtered: their result
filter_in_blocks    imm and gpb2 of one long series, blocks of time in parallel; BlockFiltered
SwitchingFilter     these filters, one observation at a time; FilterState: the state between steps; Predicted
association_probability   probabilities of PDA for detections of uncertain origin; Association
enumerate_modes     the exact filter over all mode histories; Enumerated
rao_blackwell_filter   the particle filter over mode histories; Sampled
smooth              states and modes given all observations; Smoothed
fit                 parameters by EM or gradient ascent; Fitted
ConjugateFilter     filters for other conjugate families, such as GammaPoisson; Discount, Reset, LinearMotion
AttentionFilter     softmax attention as a filter, with the covariance it drops; Slots, linear_link
attentive_imm       filters whose transitions depend on the state; attentive_gpb1, attentive_gpb2, attended_model,
                    fit_eta
ConjugateWeights    attention to natural parameters, weighted by their conjugate posterior; EtaPosterior
normalized_innovation   consistency of a filter (NIS); nees, in_gate, innovation_scores, Consistency
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
from .gaussian.clutter import (
    Clutter as Clutter,
    with_clutter as with_clutter,
    prior_with_clutter as prior_with_clutter,
    without_clutter as without_clutter,
)
from .prior_and_series import Prior as Prior, Series as Series
from .gaussian.switching import gpb1 as gpb1, gpb2 as gpb2, imm as imm, gpb as gpb, SwitchingFilter as SwitchingFilter
from .gaussian.blocks import filter_in_blocks as filter_in_blocks, BlockFiltered as BlockFiltered
from .gaussian.attentive_switching import (
    attentive_imm as attentive_imm,
    attentive_gpb1 as attentive_gpb1,
    attentive_gpb2 as attentive_gpb2,
    attended_model as attended_model,
)
from .gaussian.switching_steps import Predicted as Predicted
from .gaussian.association import association_probability as association_probability, Association as Association
from .results import Filtered as Filtered, FilterState as FilterState
from .gaussian.enumeration import enumerate_modes as enumerate_modes, Enumerated as Enumerated
from .gaussian.smoother import smooth as smooth, Smoothed as Smoothed
from .gaussian.particle import rao_blackwell_filter as rao_blackwell_filter, Sampled as Sampled
from .fitting.learning import fit as fit, Fitted as Fitted
from .fitting.eta_fit import fit_eta as fit_eta, FittedEta as FittedEta
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
    linear_link as linear_link,
    LinearLink as LinearLink,
)
from .conjugate.conjugate_weights import ConjugateWeights as ConjugateWeights, EtaPosterior as EtaPosterior
from .gaussian.innovation_scores import innovation_scores as innovation_scores
from .gaussian.consistency import (
    normalized_innovation as normalized_innovation,
    nees as nees,
    in_gate as in_gate,
    Consistency as Consistency,
)
