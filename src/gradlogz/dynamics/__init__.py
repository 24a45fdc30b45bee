"""Clouds of tokens under repeated attention.

evolve          repeat an ascent and a contraction; Ascent, Contraction, Trajectory, CloudVerdict
plateaus        periods of constant cluster count; renyi_centers, where clusters form under a causal mask
null_band       null interval of an observable for Gaussian clouds; mardia_band, bootstrap_clouds, ConfidenceBand
GaussianCloud   mean and covariance of a Gaussian cloud in closed form
equilibrium     fixed points of maps of tokens, with implicit gradients; spectral_radius, jacobian_penalty
EquilibriumAttention   deep equilibrium layer
retrieve        modern Hopfield networks; hopfield_energy, retrieval_bound, capacity_constant, HopfieldRetrieval
Ising           classical Hopfield networks; hebbian, gaussian_machine, boltzmann_machine
hermite_growth  growth factors of small deviations; sphere_growth, fastest_degree, escape_time, self_weight,
                critical_beta
hermite_mode    amplitudes of these deviations, measured on tokens; harmonic_mode
"""

from .evolution import evolve as evolve, Ascent as Ascent, Trajectory as Trajectory
from .verdict import CloudVerdict as CloudVerdict
from .contraction import Contraction as Contraction
from .intervals import ConfidenceBand as ConfidenceBand, bootstrap_clouds as bootstrap_clouds
from .gaussian_null import null_band as null_band, mardia_band as mardia_band
from .metastability import plateaus as plateaus, Plateau as Plateau, renyi_centers as renyi_centers
from .gaussian_cloud import GaussianCloud as GaussianCloud
from .growth import (
    hermite_growth as hermite_growth,
    sphere_growth as sphere_growth,
    hermite_curves as hermite_curves,
    sphere_curves as sphere_curves,
    fastest_degree as fastest_degree,
    escape_time as escape_time,
    self_weight as self_weight,
    critical_beta as critical_beta,
)
from .mode_amplitudes import hermite_mode as hermite_mode, harmonic_mode as harmonic_mode
from .fixed_points import (
    equilibrium as equilibrium,
    Equilibrium as Equilibrium,
    spectral_radius as spectral_radius,
    jacobian_penalty as jacobian_penalty,
    secular_equilibrium as secular_equilibrium,
)
from .equilibrium_attention import EquilibriumAttention as EquilibriumAttention
from .hopfield import (
    hopfield_energy as hopfield_energy,
    retrieve as retrieve,
    Retrieval as Retrieval,
    pattern_separation as pattern_separation,
    retrieval_bound as retrieval_bound,
    capacity_constant as capacity_constant,
    HopfieldRetrieval as HopfieldRetrieval,
)
from .ising import (
    Ising as Ising,
    hebbian as hebbian,
    gaussian_machine as gaussian_machine,
    boltzmann_machine as boltzmann_machine,
    visible_law as visible_law,
    spin_corners as spin_corners,
)
