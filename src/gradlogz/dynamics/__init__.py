"""Clouds of tokens under repeated attention.

evolve          an ascent and a contraction, repeated; Ascent, Trajectory, Verdict
plateaus        how long clusters last; renyi_centers, where they will be
null_band       what a Gaussian cloud would show; mardia_band, resample, Band
GaussianCloud   the same for the two moments of a Gaussian, in closed form
equilibrium     where a map of tokens rests, with implicit gradients; spectral_radius, jacobian_penalty
EquilibriumAttention   such a place as a layer
retrieve        Hopfield networks: hopfield_energy, retrieval_bound, capacity_constant, HopfieldRetrieval
Ising           classical networks: hebbian, and the machines that are the same: gaussian_machine, boltzmann_machine
hermite_growth  what theory says of small departures; sphere_growth, fastest_degree, escape_time; self_weight,
                critical_beta
hermite_mode    the same departures on tokens; harmonic_mode
"""

from .contraction import Contraction
from .equilibrium_attention import EquilibriumAttention
from .evolution import Ascent, Trajectory, evolve
from .fixed_points import Equilibrium, equilibrium, jacobian_penalty, secular_equilibrium, spectral_radius
from .gaussian_cloud import GaussianCloud
from .gaussian_null import mardia_band, null_band
from .growth import (
    critical_beta,
    escape_time,
    fastest_degree,
    hermite_curves,
    hermite_growth,
    self_weight,
    sphere_curves,
    sphere_growth,
)
from .hopfield import (
    HopfieldRetrieval,
    Retrieval,
    capacity_constant,
    hopfield_energy,
    retrieval_bound,
    retrieve,
    separation,
)
from .intervals import Band, resample
from .ising import Ising, boltzmann_machine, corners, gaussian_machine, hebbian, visible_law
from .metastability import Plateau, plateaus, renyi_centers
from .mode_amplitudes import harmonic_mode, hermite_mode
from .verdict import Verdict

__all__ = [
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
]
