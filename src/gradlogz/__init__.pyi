# The names at the root, each written once, in reading order; __init__.py imports them from here on first use.

from . import (
    measures as measures,
    attention as attention,
    dynamics as dynamics,
    filters as filters,
    contrastive as contrastive,
)
from . import (
    integrations as integrations,
    probing as probing,
    simulation as simulation,
    tracking as tracking,
    reporting as reporting,
    verification as verification,
)
from .measures import (
    Measure as Measure,
    Empirical as Empirical,
    Gaussian as Gaussian,
    Mixture as Mixture,
    Sphere as Sphere,
    Gamma as Gamma,
    InverseGaussian as InverseGaussian,
    Poisson as Poisson,
    Spins as Spins,
    OneHot as OneHot,
    Wishart as Wishart,
    Statistic as Statistic,
    ConjugatePrior as ConjugatePrior,
    tilt as tilt,
    convolve as convolve,
    add as add,
    product as product,
    pushforward as pushforward,
    reweight as reweight,
    merge as merge,
    dual as dual,
    bregman as bregman,
)
from .measures.measure import measure as measure
from .attention import (
    attend as attend,
    observe as observe,
    monitor as monitor,
    register as register,
    MultiheadAttention as MultiheadAttention,
    MomentAttention as MomentAttention,
    MixtureAttention as MixtureAttention,
    GatedHeads as GatedHeads,
    LinkAttention as LinkAttention,
)
from .dynamics import (
    evolve as evolve,
    Ascent as Ascent,
    GaussianCloud as GaussianCloud,
    equilibrium as equilibrium,
    retrieve as retrieve,
)
from .filters import (
    SwitchingModel as SwitchingModel,
    KalmanModel as KalmanModel,
    Prior as Prior,
    Series as Series,
    imm as imm,
    gpb1 as gpb1,
    gpb2 as gpb2,
    smooth as smooth,
    fit as fit,
    SwitchingFilter as SwitchingFilter,
    ConjugateFilter as ConjugateFilter,
    AttentionFilter as AttentionFilter,
)
from .contrastive import (
    Likelihood as Likelihood,
    info_nce as info_nce,
    clip_loss as clip_loss,
    nt_xent as nt_xent,
    siglip as siglip,
    supervised_contrastive as supervised_contrastive,
)
from .probing import probe as probe, capture as capture, intervene as intervene
from .simulation import simulate as simulate, sweep as sweep
from .tracking import track as track
from .reporting import report as report, compare as compare

__version__: str
__all__: list[str]
