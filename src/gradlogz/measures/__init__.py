"""Measures: the log normaliser, its gradient (attention), its Hessian (Fisher information).

Read measure.py first, then empirical.py and gaussian.py, then algebra.py. (The decorator `measure` is exported at the
root: here its module has that name.)
"""

from .algebra import add, convolve, product, pushforward, reweight, tilt
from .annealing import (
    Annealed,
    ancestors,
    anneal,
    effective_sample_size,
    gibbs_move,
    metropolis_move,
    particles,
    random_walk_move,
)
from .boosting import boost, margin_measure
from .conversion import from_distribution, to_distribution
from .differentiated import Differentiated
from .duality import bregman, dual, link, maximum_entropy, project
from .empirical import Empirical
from .exponential import Gamma, InverseGaussian, OneHot, Poisson, Separable, Spins
from .gating import Partial, merge
from .gaussian import Gaussian
from .gibbs import Chain, Gibbs, MeanField
from .measure import Measure
from .mixture import Mixture
from .prior import ConjugatePrior
from .sphere import Sphere
from .statistic import Statistic
from .wishart import Wishart, smat, svec

__all__ = [
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
]
