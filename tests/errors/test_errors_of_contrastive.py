"""Contrastive losses say what is wrong with vectors, labels, indices, weights and temperatures."""

import torch

import gradlogz as gz
from support.error_form import each_of, refused

a, b = torch.ones(4, 3), torch.ones(4, 3)
y = torch.tensor([0, 0, 1, 1])
zero = torch.zeros(4, dtype=torch.long)
family = gz.Likelihood(a, b)
sampled = {"positive": y, "negatives": torch.tensor([2, 3])}

ERRORS = [
    # vectors
    (TypeError, "info_nce: anchor must be a tensor; got list.", lambda: gz.info_nce([1.0], b)),
    (TypeError, "info_nce: anchor must be of a floating dtype; got torch.int64.", lambda: gz.info_nce(a.long(), b)),
    (ValueError, "info_nce: anchor must be [m, d]; got shape (3,).", lambda: gz.info_nce(a[0], b)),
    (
        ValueError,
        "nt_xent: a must hold at least one vector; got shape (0, 3).",
        lambda: gz.nt_xent(a[:0], b[:0]),
    ),
    (
        ValueError,
        "clip_loss: vectors must have one dimension d; got a (4, 3), b (4, 2).",
        lambda: gz.clip_loss(a, b[:, :2], normalize=True),
    ),
    (
        ValueError,
        "info_nce: tensors must be on one device; got anchor on cpu, candidates on meta.",
        lambda: gz.info_nce(a, b.to("meta")),
    ),
    (
        TypeError,
        "info_nce: tensors must share one dtype; got anchor torch.float32, candidates torch.float64.",
        lambda: gz.info_nce(a, b.double()),
    ),
    (
        ValueError,
        "info_nce: candidates must have 4 rows, as anchor; got shape (3, 3).",
        lambda: gz.info_nce(a, b[:3]),
    ),
    (ValueError, "nt_xent: b must have 4 rows, as a; got shape (3, 3).", lambda: gz.nt_xent(a, b[:3])),
    (
        ValueError,
        "alignment_loss: b must have 4 rows, as a; got shape (3, 3).",
        lambda: gz.contrastive.alignment_loss(a, b[:3]),
    ),
    (
        ValueError,
        "triplet_loss: negative must have 4 rows, as anchor; got shape (3, 3).",
        lambda: gz.contrastive.triplet_loss(a, b, b[:3]),
    ),
    (
        ValueError,
        "info_nce: positive must have 4 rows, as anchor; got shape (3, 3).",
        lambda: gz.info_nce(a, b, positive=b[:3]),
    ),
    (
        ValueError,
        "uniformity_loss: vectors must be at least two; got shape (1, 3).",
        lambda: gz.contrastive.uniformity_loss(a[:1]),
    ),
    (
        ValueError,
        "Likelihood: vector must have 4 rows, as anchor; got shape (2, 3).",
        lambda: family.fisher_product(b[:2]),
    ),
    # labels and indices
    (
        TypeError,
        "info_nce: positive must be a tensor of integers; got list.",
        lambda: gz.info_nce(a, b, positive=[0, 1, 2, 3]),
    ),
    (
        TypeError,
        "supervised_contrastive: labels must be a tensor of integers; got torch.float32.",
        lambda: gz.supervised_contrastive(a, y.float()),
    ),
    (
        ValueError,
        "supervised_contrastive: labels must have shape (4,); got shape (3,).",
        lambda: gz.supervised_contrastive(a, y[:3]),
    ),
    (ValueError, "nca: labels must have shape (4,); got shape (2, 2).", lambda: gz.contrastive.nca(a, y.view(2, 2))),
    (
        ValueError,
        "info_nce: labels must have shape (4,); got shape (3,).",
        lambda: gz.info_nce(a, b, labels=(y, y[:3])),
    ),
    (
        ValueError,
        "info_nce: labels must be on the device of the vectors; got meta and cpu.",
        lambda: gz.info_nce(a, b, labels=y.to("meta")),
    ),
    (
        ValueError,
        "info_nce: positive must be indices of the 4 candidates; got indices from 0 to 4.",
        lambda: gz.info_nce(a, b, positive=torch.arange(4) + torch.tensor([0, 0, 0, 1])),
    ),
    (
        ValueError,
        "proxy_loss: labels must have shape (4,); got shape (2,).",
        lambda: gz.contrastive.proxy_loss(a, b, y[:2]),
    ),
    (
        ValueError,
        "nce: negatives must be indices of the 4 candidates; got indices from -1 to -1.",
        lambda: gz.contrastive.nce(a, b, positive=y, negatives=-torch.ones(2, dtype=torch.long), noise=torch.zeros(4)),
    ),
    (
        ValueError,
        "skip_gram: negatives must be [4, k] or [k] with k > 0; got shape (0,).",
        lambda: gz.contrastive.skip_gram(a, b, positive=y, negatives=y[:0]),
    ),
    (
        ValueError,
        "ranking_nce: noise must have shape (4,); got float.",
        lambda: gz.contrastive.ranking_nce(a, b, noise=0.25, **sampled),
    ),
    # weights and masks
    (
        ValueError,
        "info_nce: log_weights must have shape (4,); got shape (3,).",
        lambda: gz.info_nce(a, b, log_weights=torch.zeros(3)),
    ),
    (
        ValueError,
        "info_nce: mask must be bool of shape (4, 4); got torch.float32 of shape (4, 4).",
        lambda: gz.info_nce(a, b, mask=torch.ones(4, 4)),
    ),
    # temperatures
    (
        ValueError,
        "info_nce: temperature must be above 0 and finite; got 0.0.",
        lambda: gz.info_nce(a, b, temperature=0.0),
    ),
    (
        ValueError,
        "nt_xent: temperature must be above 0 and finite; got -1.0.",
        lambda: gz.nt_xent(a, b, temperature=torch.tensor(-1.0)),
    ),
    (
        ValueError,
        "triplet_loss: temperature must be above 0 and finite; got 0.0.",
        lambda: gz.contrastive.triplet_loss(a, b, b, temperature=0.0),
    ),
    (
        ValueError,
        "info_nce: temperature must be one number; got shape (4,).",
        lambda: gz.info_nce(a, b, temperature=torch.ones(4)),
    ),
    (
        ValueError,
        "info_nce: temperature must be on the device of the vectors; got meta and cpu.",
        lambda: gz.info_nce(a, b, temperature=torch.ones((), device="meta")),
    ),
    (
        ValueError,
        "Contrastive: temperature must be above 0 and finite; got 0.",
        lambda: gz.contrastive.Contrastive("clip_loss", temperature=0),
    ),
    (
        ValueError,
        "clip_loss: precision must be torch.bfloat16 or torch.float16; got torch.int8.",
        lambda: gz.clip_loss(a, b, precision=torch.int8),
    ),
    # words
    (
        ValueError,
        "info_nce: reduction must be one of mean, sum, none; got 'average'.",
        lambda: gz.info_nce(a, b, reduction="average"),
    ),
    (
        ValueError,
        'supervised_contrastive: denominator must be "all" where mean_inside_log=True; got "pair".',
        lambda: gz.supervised_contrastive(a, y, mean_inside_log=True, denominator="pair"),
    ),
    # other places
    (
        ValueError,
        "Queue: size and dim must be at least 1; got size=0, dim=3.",
        lambda: gz.contrastive.Queue(0, 3),
    ),
    (
        ValueError,
        "Queue.put: vectors must be [m, 3]; got shape (4, 2).",
        lambda: gz.contrastive.Queue(8, 3).put(a[:, :2]),
    ),
    (
        ValueError,
        "Queue.put: labels must have shape (4,); got shape (2,).",
        lambda: gz.contrastive.Queue(8, 3).put(a, y[:2]),
    ),
    (
        RuntimeError,
        "ring_info_nce: processes must have been joined; got no process group.",
        lambda: gz.contrastive.ring_info_nce(a, b),
    ),
    (
        RuntimeError,
        "gather_candidates: processes must have been joined; got no process group.",
        lambda: gz.contrastive.gather_candidates(a),
    ),
    # nothing to compare
    (
        ValueError,
        "info_nce: candidates must leave a negative for each anchor; got none for some.",
        lambda: gz.info_nce(a, b, labels=zero, decoupled=True),
    ),
    (
        ValueError,
        "nt_xent: candidates must leave a negative for each anchor; got none for some.",
        lambda: gz.nt_xent(a[:1], b[:1], decoupled=True),
    ),
    (
        ValueError,
        "supervised_contrastive: labels must name at least one pair; got a label for each vector alone.",
        lambda: gz.supervised_contrastive(a, torch.arange(4)),
    ),
    (
        ValueError,
        "nca: labels must name at least one pair; got a label for each vector alone.",
        lambda: gz.contrastive.nca(a, torch.arange(4)),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)


def test_an_unknown_loss_is_refused_with_the_names_of_all():
    kind, says, call = (
        ValueError,
        "Contrastive: loss must be one of info_nce, clip_loss, nt_xent, supervised_contrastive, nca, skip_gram, nce, "
        "ranking_nce, siglip, proxy_loss, triplet_loss; got 'hinge'.",
        lambda: gz.contrastive.Contrastive("hinge"),
    )
    refused((kind, says, call))
