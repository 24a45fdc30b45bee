"""Contrastive losses as likelihoods of an exponential family, exact at any temperature, in linear memory."""

from .likelihood import Likelihood as Likelihood
from .losses import (
    info_nce as info_nce,
    ring_info_nce as ring_info_nce,
    n_pair as n_pair,
    clip_loss as clip_loss,
    nt_xent as nt_xent,
    supervised_contrastive as supervised_contrastive,
    soft_info_nce as soft_info_nce,
    nca as nca,
    skip_gram as skip_gram,
    nce as nce,
    ranking_nce as ranking_nce,
    siglip as siglip,
    proxy_loss as proxy_loss,
    triplet_loss as triplet_loss,
    alignment_loss as alignment_loss,
    uniformity_loss as uniformity_loss,
    multi_similarity_loss as multi_similarity_loss,
    circle_loss as circle_loss,
    proxy_anchor_loss as proxy_anchor_loss,
)
from .modules import Contrastive as Contrastive, SigLIP as SigLIP
from .queue import Queue as Queue
from .scaling import (
    double_centring as double_centring,
    classical_scaling as classical_scaling,
    ClassicalScaling as ClassicalScaling,
)
from .distributed import gather_candidates as gather_candidates, Gathered as Gathered
from .language_head import linear_cross_entropy as linear_cross_entropy, LinearCrossEntropy as LinearCrossEntropy
from .retrieval import retrieval_ranks as retrieval_ranks, recall_at as recall_at
from .large_batches import cached_backward as cached_backward, matryoshka_loss as matryoshka_loss
