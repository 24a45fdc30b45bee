"""Contrastive losses: likelihoods of one exponential family, exact at any temperature, in linear memory."""

from .distributed import Gathered, gather_candidates, ring_info_nce
from .likelihood import Likelihood
from .losses import (
    Contrastive,
    alignment,
    bernoulli,
    clip,
    info_nce,
    n_pair,
    nca,
    nce,
    nt_xent,
    proxy,
    ranking_nce,
    skip_gram,
    supervised_contrastive,
    triplet,
    uniformity,
)
from .queue import Queue

__all__ = [
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
]
