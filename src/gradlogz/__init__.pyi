# The names at the root, each written once, in reading order; __init__.py imports them from here on first use.

from .attention import (
    GatedHeads as GatedHeads,
)
from .attention import (
    LinkAttention as LinkAttention,
)
from .attention import (
    MixtureAttention as MixtureAttention,
)
from .attention import (
    MomentAttention as MomentAttention,
)
from .attention import (
    MultiheadAttention as MultiheadAttention,
)
from .attention import (
    attend as attend,
)
from .attention import (
    monitor as monitor,
)
from .attention import (
    observe as observe,
)
from .attention import (
    register as register,
)
from .contrastive import (
    Likelihood as Likelihood,
)
from .contrastive import (
    clip_loss as clip_loss,
)
from .contrastive import (
    info_nce as info_nce,
)
from .contrastive import (
    nt_xent as nt_xent,
)
from .contrastive import (
    siglip as siglip,
)
from .contrastive import (
    supervised_contrastive as supervised_contrastive,
)
from .dynamics import (
    Ascent as Ascent,
)
from .dynamics import (
    GaussianCloud as GaussianCloud,
)
from .dynamics import (
    equilibrium as equilibrium,
)
from .dynamics import (
    evolve as evolve,
)
from .dynamics import (
    retrieve as retrieve,
)
from .filters import (
    AttentionFilter as AttentionFilter,
)
from .filters import (
    ConjugateFilter as ConjugateFilter,
)
from .filters import (
    KalmanModel as KalmanModel,
)
from .filters import (
    Prior as Prior,
)
from .filters import (
    Series as Series,
)
from .filters import (
    SwitchingFilter as SwitchingFilter,
)
from .filters import (
    SwitchingModel as SwitchingModel,
)
from .filters import (
    fit as fit,
)
from .filters import (
    gpb1 as gpb1,
)
from .filters import (
    gpb2 as gpb2,
)
from .filters import (
    imm as imm,
)
from .filters import (
    smooth as smooth,
)
from .measures import (
    ConjugatePrior as ConjugatePrior,
)
from .measures import (
    Empirical as Empirical,
)
from .measures import (
    Gamma as Gamma,
)
from .measures import (
    Gaussian as Gaussian,
)
from .measures import (
    InverseGaussian as InverseGaussian,
)
from .measures import (
    Measure as Measure,
)
from .measures import (
    Mixture as Mixture,
)
from .measures import (
    OneHot as OneHot,
)
from .measures import (
    Poisson as Poisson,
)
from .measures import (
    Sphere as Sphere,
)
from .measures import (
    Spins as Spins,
)
from .measures import (
    Statistic as Statistic,
)
from .measures import (
    Wishart as Wishart,
)
from .measures import (
    add as add,
)
from .measures import (
    bregman as bregman,
)
from .measures import (
    convolve as convolve,
)
from .measures import (
    dual as dual,
)
from .measures import (
    merge as merge,
)
from .measures import (
    product as product,
)
from .measures import (
    pushforward as pushforward,
)
from .measures import (
    reweight as reweight,
)
from .measures import (
    tilt as tilt,
)
from .measures.measure import measure as measure
from .probing import capture as capture
from .probing import probe as probe
from .reporting import compare as compare
from .reporting import report as report
from .simulation import simulate as simulate
from .simulation import sweep as sweep
from .tracking import track as track

__version__: str
__all__: list[str]
