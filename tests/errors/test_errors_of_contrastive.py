"""Contrastive losses say what is wrong with vectors, labels, indices, weights and temperatures."""

import torch

import gradlogz as gz
from support.error_form import each_of, refused

a, b = torch.ones(4, 3), torch.ones(4, 3)
y = torch.tensor([0, 0, 1, 1])
zero = torch.zeros(4, dtype=torch.long)
family = gz.Likelihood(a, b)
head = gz.contrastive.linear_cross_entropy
sampled = {"positive": y, "negatives": torch.tensor([2, 3])}

ERRORS = [
    # pairs of miners, rings
    (TypeError, "circle_loss: pairs", "tuple", lambda: gz.contrastive.circle_loss(a, y, pairs=(y, y))),
    (TypeError, "circle_loss: pairs", "integers", lambda: gz.contrastive.circle_loss(a, y, pairs=(0, 1, 2))),
    (ValueError, "circle_loss: pairs", "as many", lambda: gz.contrastive.circle_loss(a, y, pairs=(y, y[:2], y))),
    (
        ValueError,
        "circle_loss: pairs",
        "group",
        lambda: gz.contrastive.circle_loss(a, y, pairs=(y, y, y), group=object()),
    ),
    (ValueError, "circle_loss: scale", "positive", lambda: gz.contrastive.circle_loss(a, y, scale=0.0)),
    (
        ValueError,
        "supervised_contrastive: pairs",
        "candidates",
        lambda: gz.supervised_contrastive(a, y, candidates=b, candidate_labels=y, pairs=(y, y, y)),
    ),
    (ValueError, "clip_loss: ring", "group", lambda: gz.clip_loss(a, b, ring=True)),
    # distances
    (ValueError, "double_centring: squared_distances", "[*b, n, n]", lambda: gz.contrastive.double_centring(a)),
    (ValueError, "classical_scaling: dim", "from 1 to 3", lambda: gz.contrastive.classical_scaling(a[:3], 4)),
    # vectors
    (TypeError, "info_nce: anchor", "a tensor", lambda: gz.info_nce([1.0], b)),
    (TypeError, "info_nce: anchor", "floating", lambda: gz.info_nce(a.long(), b)),
    (ValueError, "info_nce: anchor", "[m, d]", lambda: gz.info_nce(a[0], b)),
    (
        ValueError,
        "nt_xent: a",
        "vector",
        lambda: gz.nt_xent(a[:0], b[:0]),
    ),
    (
        ValueError,
        "clip_loss: None",
        "dimension",
        lambda: gz.clip_loss(a, b[:, :2], normalize=True),
    ),
    (
        ValueError,
        "info_nce: None",
        "device",
        lambda: gz.info_nce(a, b.to("meta")),
    ),
    (
        ValueError,
        "info_nce: candidates",
        "positive=",
        lambda: gz.info_nce(a, b[:3]),
    ),
    (ValueError, "clip_loss: b", "one row for each row of a", lambda: gz.clip_loss(a, b[:3])),
    (ValueError, "n_pair: candidates", "positive=", lambda: gz.contrastive.n_pair(a, b[:3])),
    (ValueError, "n_pair: None", "dimension", lambda: gz.contrastive.n_pair(a, b[:, :2], normalize=True)),
    (ValueError, "proxy_loss: None", "proxies", lambda: gz.contrastive.proxy_loss(a, b[:, :2], y)),
    (ValueError, "proxy_loss: labels", "proxies", lambda: gz.contrastive.proxy_loss(a, b[:1], y)),
    (ValueError, "skip_gram: None", "contexts", lambda: gz.contrastive.skip_gram(a, b[:, :2], positive=y)),
    (ValueError, "info_nce: candidates", "least", lambda: gz.info_nce(a, b[:0], positive=y)),
    (
        ValueError,
        "Likelihood: positive",
        "exclude_self",
        lambda: gz.Likelihood(a, b, exclude_self=True),
    ),
    (
        ValueError,
        "Likelihood.sample: candidates",
        "negative",
        lambda: gz.Likelihood(a, b, ids=zero).sample((2,)),
    ),
    (ValueError, "info_nce: bias", "shape (4, 4)", lambda: gz.info_nce(a, b, bias=torch.zeros(4))),
    (
        ValueError,
        "triplet_loss: similarity",
        "squared_distance",
        lambda: gz.contrastive.triplet_loss(a, b, b, similarity="cosine"),
    ),
    (
        ValueError,
        "Contrastive: temperature",
        "minimum",
        lambda: gz.contrastive.Contrastive("clip_loss", 0.005, True, minimum=0.01),
    ),
    (ValueError, "SigLIP: scale", "positive", lambda: gz.contrastive.SigLIP(scale=0.0)),
    (ValueError, "nt_xent: b", "rows", lambda: gz.nt_xent(a, b[:3])),
    (
        ValueError,
        "alignment_loss: b",
        "rows",
        lambda: gz.contrastive.alignment_loss(a, b[:3]),
    ),
    (
        ValueError,
        "triplet_loss: negative",
        "anchor",
        lambda: gz.contrastive.triplet_loss(a, b, b[:3]),
    ),
    (
        ValueError,
        "info_nce: positive",
        "anchor",
        lambda: gz.info_nce(a, b, positive=b[:3]),
    ),
    (
        ValueError,
        "uniformity_loss: vectors",
        "least",
        lambda: gz.contrastive.uniformity_loss(a[:1]),
    ),
    (
        ValueError,
        "Likelihood: vector",
        "anchor",
        lambda: family.fisher_product(b[:2]),
    ),
    # labels and indices
    (
        TypeError,
        "info_nce: positive",
        "integers",
        lambda: gz.info_nce(a, b, positive=[0, 1, 2, 3]),
    ),
    (
        TypeError,
        "supervised_contrastive: labels",
        "integers",
        lambda: gz.supervised_contrastive(a, y.float()),
    ),
    (
        ValueError,
        "supervised_contrastive: labels",
        "shape (4,)",
        lambda: gz.supervised_contrastive(a, y[:3]),
    ),
    (ValueError, "nca: labels", "shape (4,)", lambda: gz.contrastive.nca(a, y.view(2, 2))),
    (
        ValueError,
        "info_nce: ids",
        "shape (4,)",
        lambda: gz.info_nce(a, b, ids=(y, y[:3])),
    ),
    (
        ValueError,
        "info_nce: ids",
        "vectors",
        lambda: gz.info_nce(a, b, ids=y.to("meta")),
    ),
    (
        ValueError,
        "info_nce: positive",
        "candidates",
        lambda: gz.info_nce(a, b, positive=torch.arange(4) + torch.tensor([0, 0, 0, 1])),
    ),
    (
        ValueError,
        "proxy_loss: labels",
        "shape (4,)",
        lambda: gz.contrastive.proxy_loss(a, b, y[:2]),
    ),
    (
        ValueError,
        "nce: negatives",
        "candidates",
        lambda: gz.contrastive.nce(a, b, positive=y, negatives=-torch.ones(2, dtype=torch.long), noise=torch.zeros(4)),
    ),
    (
        ValueError,
        "skip_gram: negatives",
        "k > 0",
        lambda: gz.contrastive.skip_gram(a, b, positive=y, negatives=y[:0]),
    ),
    (
        ValueError,
        "ranking_nce: noise",
        "shape (4,)",
        lambda: gz.contrastive.ranking_nce(a, b, noise=0.25, **sampled),
    ),
    # weights and masks
    (
        ValueError,
        "info_nce: log_weights",
        "shape (4,)",
        lambda: gz.info_nce(a, b, log_weights=torch.zeros(3)),
    ),
    (
        ValueError,
        "info_nce: mask",
        "shape",
        lambda: gz.info_nce(a, b, mask=torch.ones(4, 4)),
    ),
    # temperatures
    (
        ValueError,
        "info_nce: temperature",
        "finite",
        lambda: gz.info_nce(a, b, temperature=0.0),
    ),
    (
        ValueError,
        "nt_xent: temperature",
        "finite",
        lambda: gz.nt_xent(a, b, temperature=torch.tensor(-1.0)),
    ),
    (
        ValueError,
        "triplet_loss: temperature",
        "finite",
        lambda: gz.contrastive.triplet_loss(a, b, b, temperature=0.0),
    ),
    (
        ValueError,
        "info_nce: temperature",
        "one number",
        lambda: gz.info_nce(a, b, temperature=torch.ones(4)),
    ),
    (
        ValueError,
        "info_nce: temperature",
        "vectors",
        lambda: gz.info_nce(a, b, temperature=torch.ones((), device="meta")),
    ),
    (
        ValueError,
        "Contrastive: temperature",
        "finite",
        lambda: gz.contrastive.Contrastive("clip_loss", temperature=0),
    ),
    (
        ValueError,
        "clip_loss: precision",
        "bfloat16",
        lambda: gz.clip_loss(a, b, precision=torch.int8),
    ),
    # words
    (
        ValueError,
        "info_nce: reduction",
        "mean",
        lambda: gz.info_nce(a, b, reduction="average"),
    ),
    (
        ValueError,
        "supervised_contrastive: denominator",
        "mean_inside_log",
        lambda: gz.supervised_contrastive(a, y, mean_inside_log=True, denominator="pair"),
    ),
    # other places
    (
        ValueError,
        "Queue: size",
        "least",
        lambda: gz.contrastive.Queue(0, 3),
    ),
    (
        ValueError,
        "Queue.put: vectors",
        "[m, 3]",
        lambda: gz.contrastive.Queue(8, 3).put(a[:, :2]),
    ),
    (
        ValueError,
        "Queue.put: labels",
        "shape (4,)",
        lambda: gz.contrastive.Queue(8, 3).put(a, y[:2]),
    ),
    (
        RuntimeError,
        "ring_info_nce: group",
        "process group",
        lambda: gz.contrastive.ring_info_nce(a, b),
    ),
    (
        RuntimeError,
        "gather_candidates: group",
        "process group",
        lambda: gz.contrastive.gather_candidates(a),
    ),
    (RuntimeError, "info_nce: group", "process group", lambda: gz.info_nce(a, b, group=object())),
    (
        ValueError,
        "info_nce: mask",
        "group=",
        lambda: gz.info_nce(a, b, mask=torch.ones(4, 4).bool(), group=object()),
    ),
    (RuntimeError, "nca: group", "process group", lambda: gz.contrastive.nca(a, y, group=object())),
    (RuntimeError, "nt_xent: group", "process group", lambda: gz.nt_xent(a, b, group=object())),
    (RuntimeError, "supervised_contrastive: group", "process", lambda: gz.supervised_contrastive(a, y, group=object())),
    # several positives, hard negatives, targets
    (
        ValueError,
        "supervised_contrastive: candidate_labels",
        "together",
        lambda: gz.supervised_contrastive(a, y, candidates=b),
    ),
    (ValueError, "info_nce: hard_negatives", "[4, k, 3]", lambda: gz.info_nce(a, b, hard_negatives=b)),
    (
        ValueError,
        "soft_info_nce: targets",
        "shape (4, 4)",
        lambda: gz.contrastive.soft_info_nce(a, b, torch.ones(4)),
    ),
    # steps of training
    (ValueError, "recall_at: k", "least 1", lambda: gz.contrastive.recall_at(a, b, k=0)),
    (
        ValueError,
        "cached_backward: parts",
        "encoders",
        lambda: gz.contrastive.cached_backward(gz.info_nce, [torch.nn.Identity()], []),
    ),
    (
        ValueError,
        "matryoshka_loss: dims",
        "1 to 3",
        lambda: gz.contrastive.matryoshka_loss(gz.info_nce, a, b, dims=(4,)),
    ),
    (
        ValueError,
        "matryoshka_loss: weights",
        "one number",
        lambda: gz.contrastive.matryoshka_loss(gz.info_nce, a, b, dims=(3,), weights=()),
    ),
    # the language-model head
    (ValueError, "linear_cross_entropy: hidden", "[*b, d]", lambda: head(torch.tensor(1.0), b, y)),
    (ValueError, "linear_cross_entropy: None", "dimension", lambda: head(a, b[:, :2], y)),
    (ValueError, "linear_cross_entropy: labels", "shape (4,)", lambda: head(a, b, y[:2])),
    (ValueError, "linear_cross_entropy: labels", "words", lambda: head(a, b, y + 3)),
    (ValueError, "linear_cross_entropy: bias", "shape (4,)", lambda: head(a, b, y, bias=torch.zeros(3))),
    (ValueError, "linear_cross_entropy: softcap", "positive", lambda: head(a, b, y, softcap=0.0)),
    (ValueError, "linear_cross_entropy: bias", "list", lambda: head(a, b, y, bias=[0.0] * 4)),
    (ValueError, "linear_cross_entropy: softcap", "finite", lambda: head(a, b, y, softcap=torch.inf)),
    (ValueError, "linear_cross_entropy: z_loss", "not negative", lambda: head(a, b, y, z_loss=-1.0)),
    (ValueError, "linear_cross_entropy: z_loss", "finite", lambda: head(a, b, y, z_loss=torch.inf)),
    (ValueError, "linear_cross_entropy: label_smoothing", "most 1", lambda: head(a, b, y, label_smoothing=1.5)),
    (ValueError, "linear_cross_entropy: precision", "float16", lambda: head(a, b, y, precision=torch.float16)),
    (
        ValueError,
        "linear_cross_entropy: precision",
        "float64",
        lambda: head(a.double(), b.double(), y, precision=torch.bfloat16),
    ),
    (ValueError, "linear_cross_entropy: first_word", "divided", lambda: head(a, b, y, first_word=0)),
    # nothing to compare
    (
        ValueError,
        "info_nce: candidates",
        "negative",
        lambda: gz.info_nce(a, b, ids=zero, decoupled=True),
    ),
    (
        ValueError,
        "nt_xent: candidates",
        "negative",
        lambda: gz.nt_xent(a[:1], b[:1], decoupled=True),
    ),
    (
        ValueError,
        "supervised_contrastive: labels",
        "positive",
        lambda: gz.supervised_contrastive(a, torch.arange(4)),
    ),
    (
        ValueError,
        "nca: labels",
        "positive",
        lambda: gz.contrastive.nca(a, torch.arange(4)),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)


def test_an_unknown_loss_is_refused_with_the_names_of_all():
    names = (
        "info_nce, n_pair, clip_loss, nt_xent, supervised_contrastive, nca, skip_gram, nce, ranking_nce, siglip, "
        "proxy_loss, triplet_loss"
    )
    refused((ValueError, "Contrastive: loss", names, lambda: gz.contrastive.Contrastive("hinge")))
