"""Measures: the log normaliser, its gradient (attention), its Hessian (Fisher information).

Read measure.py first, then empirical.py and gaussian.py, then algebra.py. (The decorator `measure` is exported at the
root: here its module has that name.)
"""

from .measure import Measure as Measure
from .empirical import Empirical as Empirical
from .gaussian import Gaussian as Gaussian
from .mixture import Mixture as Mixture
from .sphere import Sphere as Sphere
from .exponential import (
    Gamma as Gamma,
    InverseGaussian as InverseGaussian,
    Poisson as Poisson,
    Spins as Spins,
    OneHot as OneHot,
    Separable as Separable,
)
from .wishart import Wishart as Wishart, svec as svec, smat as smat
from .statistic import Statistic as Statistic
from .prior import ConjugatePrior as ConjugatePrior
from .._pytree import static_field as static_field
from .differentiated import Differentiated as Differentiated
from .algebra import (
    tilt as tilt,
    convolve as convolve,
    add as add,
    product as product,
    pushforward as pushforward,
    reweight as reweight,
)
from .gating import PartialStatistics as PartialStatistics, merge as merge
from .duality import (
    dual as dual,
    mean_to_natural as mean_to_natural,
    bregman as bregman,
    moment_project as moment_project,
    maximum_entropy as maximum_entropy,
)
from .conversion import from_distribution as from_distribution, to_distribution as to_distribution
from .boosting import margin_measure as margin_measure, boost as boost
from .gibbs import Gibbs as Gibbs, GibbsChain as GibbsChain, GibbsMeanField as GibbsMeanField
from .annealing import (
    draw_particles as draw_particles,
    anneal as anneal,
    Annealed as Annealed,
    resample_ancestors as resample_ancestors,
    effective_sample_size as effective_sample_size,
    gibbs_move as gibbs_move,
    metropolis_move as metropolis_move,
    random_walk_move as random_walk_move,
)
