"""Contrastive losses, each defined by the likelihood of ../likelihood.py.

    -log p(+) = G(eta) - <eta, x_+>,   eta = anchor / temperature,   G = log sum of exp<eta, x> over the denominator

    loss                                    anchors     the denominator sums over
    info_nce                [oord18]        a           all candidates, including the positive
    n_pair                  [sohn16]        a           all candidates, including the positive
    clip_loss               [radford21]     a and b     all vectors of the other side, including the positive
    nt_xent                 [chen20]        a and b     all other vectors of both views, including the positive
    supervised_contrastive  [khosla20]      all         all other vectors, including all positives
    soft_info_nce                           a           all candidates; the numerator over all, by target
    nca                     [goldberger04]  all         all other vectors; the numerator over those of the same class
    skip_gram               [mikolov13]     center      all contexts; with negative sampling each context separately
    nce                     [gutmann10]     a           each candidate separately, against known noise
    ranking_nce             [ma18]          a           the positive and its negatives, each divided by its noise
    siglip                  [zhai23b]       a           each pair separately
    proxy_loss              [movshovitz17]  a           all proxies
    triplet_loss            [schroff15]     a           the positive and one negative, at temperature 0
    alignment_loss          [wang20]        a           no denominator
    uniformity_loss         [wang20]        all         all other vectors, with the mean over anchors in the logarithm

multi_similarity_loss [wang19], circle_loss [sun20] and proxy_anchor_loss [kim20] are not likelihoods: pair_weights.py.

Logits are <anchor, candidate> / temperature, normalised only with normalize=True. The positive of anchor i is candidate
i unless `positive` is passed. Memory is linear in the batch.

Read next: one_positive.py; ../distributed.py and ../queue.py (candidates of other processes and earlier batches).
"""

from .one_positive import (
    info_nce as info_nce,
    ring_info_nce as ring_info_nce,
    n_pair as n_pair,
    proxy_loss as proxy_loss,
)
from .two_views import clip_loss as clip_loss, nt_xent as nt_xent
from .several_positives import (
    supervised_contrastive as supervised_contrastive,
    soft_info_nce as soft_info_nce,
    nca as nca,
)
from .sampled_negatives import skip_gram as skip_gram, nce as nce, ranking_nce as ranking_nce
from .sigmoids import siglip as siglip
from .distances import (
    triplet_loss as triplet_loss,
    alignment_loss as alignment_loss,
    uniformity_loss as uniformity_loss,
)
from .pair_weights import (
    multi_similarity_loss as multi_similarity_loss,
    circle_loss as circle_loss,
    proxy_anchor_loss as proxy_anchor_loss,
)
from .options import LossOptions as LossOptions
