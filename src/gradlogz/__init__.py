"""gradlogz: attention is the gradient of a log normaliser.

    h          a measure on R^d (the keys)       G(eta) = log ∫ exp<x, eta> h(dx)     log normaliser
    query      the natural parameter eta         ∇G(eta)                              attention
    residual   convolution with the Dirac at x   ∇²G(eta)                             Fisher information

Names are imported on first use, so that the command line answers at once; the list below is in reading order.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .attention import *  # noqa: F403
    from .contrastive import *  # noqa: F403
    from .dynamics import *  # noqa: F403
    from .filters import *  # noqa: F403
    from .measures import *  # noqa: F403
    from .measures.measure import measure as measure
    from .measures.measure import static as static
    from .probing import *  # noqa: F403
    from .reporting import *  # noqa: F403
    from .simulation import *  # noqa: F403
    from .tracking import *  # noqa: F403

__version__ = "0.1.0"

_CHAPTERS = {
    "measures": (
        "Measure",
        "Empirical",
        "Gaussian",
        "Mixture",
        "Sphere",
        "Gamma",
        "InverseGaussian",
        "Poisson",
        "Spins",
        "OneHot",
        "Wishart",
        "Statistic",
        "ConjugatePrior",
        "tilt",
        "convolve",
        "add",
        "product",
        "pushforward",
        "reweight",
        "Partial",
        "merge",
        "dual",
        "link",
        "bregman",
        "project",
        "maximum_entropy",
        "from_distribution",
        "to_distribution",
        "margin_measure",
        "boost",
        "Gibbs",
        "Chain",
        "MeanField",
        "particles",
        "anneal",
        "Annealed",
        "ancestors",
        "effective_sample_size",
        "gibbs_move",
        "metropolis_move",
        "random_walk_move",
        "svec",
        "smat",
        "Differentiated",
        "Separable",
    ),
    "measures.measure": ("measure", "static"),
    "attention": (
        "attend",
        "Attention",
        "observe",
        "Observation",
        "monitor",
        "Monitor",
        "Row",
        "Alert",
        "Thresholds",
        "register",
        "unregister",
        "MultiheadAttention",
        "MomentAttention",
        "MixtureAttention",
        "GatedHeads",
        "LinkAttention",
    ),
    "dynamics": (
        "evolve",
        "Ascent",
        "Trajectory",
        "Verdict",
        "Band",
        "null_band",
        "mardia_band",
        "resample",
        "plateaus",
        "Plateau",
        "renyi_centers",
        "Contraction",
        "GaussianCloud",
        "hermite_growth",
        "sphere_growth",
        "hermite_curves",
        "sphere_curves",
        "fastest_degree",
        "escape_time",
        "hermite_mode",
        "harmonic_mode",
        "self_weight",
        "critical_beta",
        "equilibrium",
        "Equilibrium",
        "spectral_radius",
        "jacobian_penalty",
        "EquilibriumAttention",
        "secular_equilibrium",
        "hopfield_energy",
        "retrieve",
        "Retrieval",
        "separation",
        "retrieval_bound",
        "capacity_constant",
        "HopfieldRetrieval",
        "Ising",
        "hebbian",
        "gaussian_machine",
        "boltzmann_machine",
        "visible_law",
        "corners",
    ),
    "filters": (
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
    ),
    "contrastive": (
        "Likelihood",
        "info_nce",
        "n_pair",
        "clip",
        "nt_xent",
        "supervised_contrastive",
        "nca",
        "skip_gram",
        "nce",
        "ranking_nce",
        "bernoulli",
        "proxy",
        "triplet",
        "alignment",
        "uniformity",
        "Contrastive",
        "Queue",
        "gather_candidates",
        "Gathered",
        "ring_info_nce",
    ),
    "probing": (
        "probe",
        "Findings",
        "Finding",
        "Claim",
        "Token",
        "capture",
        "Captured",
        "Attended",
        "Passed",
        "Normed",
    ),
    "reporting": ("report", "compare"),
    "simulation": ("simulate", "Simulation", "sweep", "Phases"),
    "tracking": ("track", "Tracks"),
}
_HOME = {name: chapter for chapter, names in _CHAPTERS.items() for name in names}
__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in (
        "measures",
        "attention",
        "dynamics",
        "filters",
        "contrastive",
        "probing",
        "kernels",
        "reporting",
        "simulation",
        "tracking",
        "verification",
        "cli",
        "page",
    ):
        return import_module(f".{name}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'gradlogz' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
