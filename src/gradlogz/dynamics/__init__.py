"""Clouds of tokens under repeated attention.

evolve          repeat an ascent and a contraction; Ascent, AffineStep, Trajectory, CloudVerdict
Contraction     a normalisation between steps; LayerNorm, Whitening, Shrinkage, InverseStep with parameters
TrainedHeads    attention of a trained layer in a step; Rotation, LayerNorms
plateaus        periods of constant cluster count; renyi_centers, where clusters form under a causal mask
cluster_stability   factors of deviations from clusters under whitening; cluster_centers, centered_simplex_factors
null_band       null interval of an observable for Gaussian clouds; mardia_band, bootstrap_clouds, ConfidenceBand
GaussianCloud   mean and covariance of a Gaussian cloud in closed form
equilibrium     fixed points of maps of tokens, with implicit gradients; spectral_radius, jacobian_penalty
EquilibriumAttention   deep equilibrium layer
monotone_equilibrium   the one fixed point of a monotone map; attention_certificate, Certificate, MonotoneAttention
retrieve        modern Hopfield networks; hopfield_energy, retrieval_bound, capacity_constant, HopfieldRetrieval
Ising           classical Hopfield networks; hebbian, gaussian_machine, boltzmann_machine
contrastive_divergence   learning of these machines; exact_gradient, visible_log_likelihood, fit_machine
VectorSpins     models whose mean field is attention
HopfieldFeedForward    W^T f(W x) with its energy; EnergyBlock: attention and this layer with one energy
hermite_growth  growth factors of small deviations; sphere_growth, fastest_degree, escape_time, self_weight,
                critical_beta
hermite_mode    amplitudes of these deviations, measured on tokens; harmonic_mode
"""

from .evolution import evolve as evolve, Ascent as Ascent, Trajectory as Trajectory
from .trained_heads import TrainedHeads as TrainedHeads, Rotation as Rotation
from .layer_norms import LayerNorms as LayerNorms
from .verdict import CloudVerdict as CloudVerdict
from .contraction import (
    Contraction as Contraction,
    InverseStep as InverseStep,
    LayerNorm as LayerNorm,
    Shrinkage as Shrinkage,
    Whitening as Whitening,
)
from .attention_step import AffineStep as AffineStep
from .intervals import ConfidenceBand as ConfidenceBand, bootstrap_clouds as bootstrap_clouds
from .gaussian_null import null_band as null_band, mardia_band as mardia_band
from .metastability import plateaus as plateaus, Plateau as Plateau, renyi_centers as renyi_centers
from .whitened_clusters import (
    ClusterStability as ClusterStability,
    SimplexFactors as SimplexFactors,
    centered_simplex_factors as centered_simplex_factors,
    cluster_centers as cluster_centers,
    cluster_stability as cluster_stability,
)
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
from .monotone import (
    monotone_equilibrium as monotone_equilibrium,
    attention_certificate as attention_certificate,
    Certificate as Certificate,
)
from .monotone_attention import MonotoneAttention as MonotoneAttention
from .feed_forward import HopfieldFeedForward as HopfieldFeedForward
from .block_energy import EnergyBlock as EnergyBlock
from .vector_spins import VectorSpins as VectorSpins
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
    visible_distribution as visible_distribution,
    spin_corners as spin_corners,
)
from .machine_fitting import (
    contrastive_divergence as contrastive_divergence,
    exact_gradient as exact_gradient,
    visible_log_likelihood as visible_log_likelihood,
    fit_machine as fit_machine,
    MachineGradient as MachineGradient,
)
