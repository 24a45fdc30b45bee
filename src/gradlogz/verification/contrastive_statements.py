"""Contrastive losses as likelihoods, compared with sums over all candidates.   [paper 2.1, 2.2; note 1; theory 6.6]

    loss_i = -log p(+ | a_i) = G(η_i) - <η_i, x₊>,   η_i = a_i / temperature,   ∇_η loss = attention - x₊

Read next: ../contrastive/losses/.
"""

import itertools

import torch
from torch.nn.functional import cosine_similarity, logsigmoid

from .._typing import Tensor
from ..contrastive.likelihood import Likelihood
from ..contrastive.losses import one_positive, sampled_negatives, several_positives, two_views
from .definition import FLOAT, normal, uniform
from .statement import Outcome, gap, statement, violation

TEMPERATURE = 0.6


def _pairs() -> tuple[Tensor, Tensor]:
    """Anchors and candidates; the positive of anchor i is candidate i."""
    return normal(5, 3, seed=1), normal(5, 3, seed=2)


@statement(
    "6.6 InfoNCE",
    "paper 2.2",
    corrected="InfoNCE = -log p(+), p = softmax <a,x>/T; gradient in a/T: attention - x₊",
)
def info_nce() -> Outcome:
    a, x = _pairs()
    log_w = normal(5, seed=3)
    terms = (a @ x.T / TEMPERATURE + log_w).exp()
    p = terms / terms.sum(-1, keepdim=True)

    def loss(anchor: Tensor) -> Tensor:
        return one_positive.info_nce(anchor, x, temperature=TEMPERATURE, log_weights=log_w, reduction="sum")

    gradient = torch.func.grad(loss)(a) * TEMPERATURE
    each = one_positive.info_nce(a, x, temperature=TEMPERATURE, log_weights=log_w, reduction="none")
    return Outcome(max(gap(each, -p.diagonal().log(), 10.0), gap(gradient, p @ x - x, 10.0)))


@statement(
    "6.6 bound",
    "paper 2.2",
    corrected="log N - InfoNCE <= mutual information, on average over all batches of a discrete distribution",
)
def bound_on_mutual_information() -> Outcome:
    """All batches of two pairs of three symbols each; the vectors of the symbols are arbitrary."""
    joint = torch.softmax(normal(9, seed=4), 0).reshape(3, 3)
    a, x = normal(3, 4, seed=5), normal(3, 4, seed=6)
    information = (joint * (joint / (joint.sum(1, keepdim=True) * joint.sum(0))).log()).sum()
    average = torch.zeros((), dtype=FLOAT)
    for i, j, k, m in itertools.product(range(3), repeat=4):
        average = average + joint[i, j] * joint[k, m] * one_positive.info_nce(a[[i, k]], x[[j, m]])
    return Outcome(violation(torch.tensor(2.0, dtype=FLOAT).log() - average, information))


@statement(
    "6.6 N-pair",
    "paper 2.2",
    corrected="N-pair = log(1 + Σ_j e^(s_j - s₊)) = ranking NCE with even noise; noise q: weights 1/q",
)
def n_pair() -> Outcome:
    a, x = _pairs()
    s = a @ x.T
    others = (s - s.diagonal().unsqueeze(-1)).exp() * (1 - torch.eye(5, dtype=FLOAT))
    expected = (1 + others.sum(-1)).log()
    positive = torch.arange(5)
    negatives = torch.stack([torch.cat((positive[:i], positive[i + 1 :])) for i in range(5)])
    even, noise = torch.full((5,), 0.2, dtype=FLOAT).log(), torch.log_softmax(normal(5, seed=3), 0)

    def ranked(log_q: Tensor) -> Tensor:
        return sampled_negatives.ranking_nce(
            a, x, positive=positive, negatives=negatives, noise=log_q, reduction="none"
        )

    corrected = s - noise
    weighted = corrected.exp().sum(-1).log() - corrected.diagonal()
    pairs = one_positive.n_pair(a, x, reduction="none")
    return Outcome(
        max(gap(pairs, expected, 10.0), gap(ranked(even), expected, 10.0), gap(ranked(noise), weighted, 10.0))
    )


@statement(
    "6.6 NCE",
    "paper 2.2",
    corrected="NCE: data against noise by -log σ(±D); the mean over data and noise is least at log_normalizer = log Z",
)
def nce() -> Outcome:
    anchor, x = normal(1, 3, seed=1), normal(6, 3, seed=2)
    noise = torch.log_softmax(normal(6, seed=3), 0)
    s = (x @ anchor[0]).detach()
    log_Z = s.exp().sum().log()
    p = (s - log_Z).exp()
    # One row for each pair of a positive, drawn from p, and a negative, drawn from the noise: the exact mean.
    positive, negative = torch.arange(6).repeat_interleave(6), torch.arange(6).repeat(6)
    probability = (p.unsqueeze(-1) * noise.exp()).flatten()

    def loss_at(log_normalizer: Tensor) -> Tensor:
        anchors = anchor.expand(36, 3)
        return sampled_negatives.nce(
            anchors, x, positive=positive, negatives=negative.unsqueeze(-1), noise=noise,
            log_normalizer=log_normalizer, reduction="none",
        )  # fmt: skip

    D = s - 0.3 - noise
    written = -logsigmoid(D[positive]) - logsigmoid(-D[negative])
    slope = torch.func.grad(lambda c: probability @ loss_at(c))
    zero = torch.zeros((), dtype=FLOAT)
    rises = violation(slope(log_Z - 0.1), zero) + violation(-slope(log_Z + 0.1), zero)  # a minimum
    return Outcome(max(gap(loss_at(zero + 0.3), written, 10.0), gap(slope(log_Z), zero), rises))


@statement(
    "6.6 skip-gram",
    "paper 2.1",
    corrected="skip-gram: -log softmax over all contexts; sampled: -log σ(s₊) - Σ_k log σ(-s_k)",
)
def skip_gram() -> Outcome:
    center, contexts, positive = normal(4, 3, seed=1), normal(7, 3, seed=2), torch.tensor([2, 0, 6, 2])
    s = center @ contexts.T
    of_positive = s[torch.arange(4), positive]
    negatives = torch.tensor([[0, 1], [3, 3], [4, 5], [6, 0]])
    sampled = -logsigmoid(of_positive) - logsigmoid(-s.gather(1, negatives)).sum(-1)
    full = sampled_negatives.skip_gram(center, contexts, positive=positive, reduction="none")
    few = sampled_negatives.skip_gram(center, contexts, positive=positive, negatives=negatives, reduction="none")
    return Outcome(max(gap(full, s.exp().sum(-1).log() - of_positive, 10.0), gap(few, sampled, 10.0)))


@statement("6.6 NT-Xent", "paper 2.2", corrected="NT-Xent: cosines, the other view against all 2N-1 other views")
def nt_xent() -> Outcome:
    a, b = _pairs()
    z = torch.cat((a, b))
    cosine = cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=-1) / TEMPERATURE
    terms = cosine.exp() * (1 - torch.eye(10, dtype=FLOAT))
    other = torch.arange(10).roll(5)
    expected = terms.sum(-1).log() - cosine[torch.arange(10), other]
    return Outcome(
        gap(two_views.nt_xent(a, b, temperature=TEMPERATURE, normalize=True, reduction="none"), expected, 10.0)
    )


@statement(
    "E21",
    "paper 2.2",
    printed="NCA sums over non-neighbours",
    corrected="NCA sums over all others: η = 2Ax_i, keys Ax_j, weights exp(-|Ax_j|²)",
)
def nca() -> Outcome:
    b, labels = normal(6, 3, seed=1) @ normal(3, 2, seed=2), torch.tensor([0, 1, 0, 1, 1, 0])
    kernel = torch.exp(-(torch.cdist(b, b, compute_mode="donot_use_mm_for_euclid_dist") ** 2))
    kernel = kernel * (1 - torch.eye(6, dtype=FLOAT))
    same = (labels.unsqueeze(-1) == labels).to(FLOAT)
    expected = -((kernel * same).sum(-1) / kernel.sum(-1)).log()
    printed = -((kernel * same).sum(-1) / (kernel * (1 - same)).sum(-1)).log()
    accuracy = -(kernel * same).sum(-1) / kernel.sum(-1)
    loss = several_positives.nca(b, labels, reduction="none")
    likely = several_positives.nca(b, labels, reduction="none", expected_accuracy=True)
    log_weights = -b.square().sum(-1)
    family = Likelihood(2 * b, b, positive=torch.arange(6).roll(1), log_weights=log_weights, exclude_self=True)
    worst = max(gap(loss, expected, 10.0), gap(likely, accuracy), gap(family.log_mass(labels), -expected, 10.0))
    return Outcome(worst, gap(printed, expected))


@statement(
    "E31",
    "note 1 3.1",
    printed="contrastive divergence: ∇G replaced by the mean after one step of a Markov chain from x₊",
    corrected="contrastive learning: loss G - <η,x₊>, gradient attention - x₊, exact",
)
def contrastive_learning() -> Outcome:
    x, eta, positive = normal(6, 3, seed=1), uniform(-1.0, 1.0, 1, 3, seed=2), torch.tensor([2])
    likelihood = Likelihood(eta, x, positive=positive)
    gradient = torch.func.grad(lambda e: one_positive.info_nce(e, x, positive=positive))(eta)
    weights = (x @ eta[0]).exp()
    p = weights / weights.sum()
    exact = p @ x - x[2]
    # Metropolis: proposals even over the points, accepted by the ratio of their weights.
    step = (weights / weights.unsqueeze(-1)).clamp(max=1.0) / 6
    step = step - torch.diag(step.sum(-1) - 1)
    corrected = max(gap(gradient[0], exact), gap(likelihood.log_probability(), p[2:3].log(), 10.0))
    return Outcome(corrected, gap(step[2] @ x - x[2], exact))
