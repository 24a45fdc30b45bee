"""Every contrastive loss is its definition, at temperatures from 1e-3 to 1e3: values and gradients.   [theory 6.6]"""

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support import contrastive_definitions as contrasts
from support.contrastive_blocks import by_blocks
from support.contrastive_definitions import TEMPERATURES
from support.measure_registry import Source, seeds
from support.scales import close

temperatures = st.sampled_from(TEMPERATURES)
LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 3])

# name: ours and the definition, of two batches of vectors and a temperature.
LOSSES = {
    "info_nce": (lambda a, b, T: gz.info_nce(a, b, temperature=T), contrasts.info_nce),
    "n_pair": (lambda a, b, T: gz.contrastive.n_pair(a / T, b), contrasts.info_nce),
    "clip": (lambda a, b, T: gz.clip_loss(a, b, temperature=T), contrasts.clip),
    "nt_xent": (lambda a, b, T: gz.nt_xent(a, b, temperature=T), contrasts.nt_xent),
    "decoupled": (
        lambda a, b, T: gz.nt_xent(a, b, temperature=T, decoupled=True),
        lambda a, b, T: contrasts.nt_xent(a, b, T, decoupled=True),
    ),
    "supervised": (
        lambda a, b, T: gz.supervised_contrastive(a + b, LABELS, temperature=T),
        lambda a, b, T: contrasts.supervised_contrastive(a + b, LABELS, T),
    ),
    "supervised, over pairs": (
        lambda a, b, T: gz.supervised_contrastive(a + b, LABELS, temperature=T, reduction="pairs"),
        lambda a, b, T: contrasts.supervised_contrastive(a + b, LABELS, T, reduction="pairs"),
    ),
    "supervised, inside": (
        lambda a, b, T: gz.supervised_contrastive(a + b, LABELS, temperature=T, mean_inside_log=True),
        lambda a, b, T: contrasts.supervised_contrastive(a + b, LABELS, T, inside=True),
    ),
    "supervised, pair by pair": (
        lambda a, b, T: gz.supervised_contrastive(a + b, LABELS, temperature=T, denominator="pair"),
        lambda a, b, T: contrasts.supervised_contrastive(a + b, LABELS, T, pair=True),
    ),
    "nca": (
        lambda a, b, T: gz.contrastive.nca(a + b, LABELS, temperature=T),
        lambda a, b, T: contrasts.nca(a + b, LABELS, T),
    ),
    "uniformity": (
        lambda a, b, T: gz.contrastive.uniformity_loss(a + b, sharpness=1 / T),
        lambda a, b, T: contrasts.uniformity(a + b, 1 / T),
    ),
    "bernoulli": (
        lambda a, b, T: gz.siglip(a, b, temperature=T, offset=-0.5),
        lambda a, b, T: contrasts.bernoulli(a, b, T, -0.5),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
@given(seed=seeds, T=temperatures, d=st.integers(1, 5), divided=st.booleans())
def test_values_and_gradients_are_those_of_the_definition(name, seed, T, d, divided):
    """From one matrix of logits, and by blocks of two rows as for large batches."""
    with by_blocks() if divided else contextlib.nullcontext():
        check_definition(name, seed, T, d)


def check_definition(name, seed, T, d):
    s = Source(seed)
    ours, definition = LOSSES[name]
    a, b = s.normal(7, d).requires_grad_(), s.normal(7, d).requires_grad_()
    t = torch.tensor(T, dtype=torch.float64, requires_grad=True)
    # Distances are up to four times the square of the longest of a + b.
    length = 1 + 2 * float(a.detach().norm(dim=-1).max() + b.detach().norm(dim=-1).max())
    scale = 1 + length**2 / T
    found, expected = ours(a, b, t), definition(a, b, t)
    close(found, expected, scale)
    for of, slope in ((a, length / T), (b, length / T), (t, length**2 / T**2)):
        (actual,) = torch.autograd.grad(found, of, retain_graph=True)
        (wanted,) = torch.autograd.grad(expected, of, retain_graph=True)
        close(actual, wanted, scale * slope)


@given(seed=seeds, T=temperatures)
def test_offsets_of_the_candidates_change_nothing(seed, T):
    s = Source(seed)
    a, b = s.normal(6, 3), s.normal(6, 3)
    # b + 1e6 is rounded to 1e-10: what is compared are the same numbers, with and without the offset.
    moved = b + 1e6
    back = moved - 1e6
    scale = 1 + float((a @ back.mT).abs().max()) / T
    close(gz.info_nce(a, moved, temperature=T), gz.info_nce(a, back, temperature=T), scale, tolerance=1e-10)


@given(seed=seeds, T=temperatures)
def test_reductions(seed, T):
    s = Source(seed)
    a, b = s.normal(6, 3), s.normal(6, 3)
    losses = gz.info_nce(a, b, temperature=T, reduction="none")
    logits = a @ b.mT / T
    scale = 1 + float(logits.abs().max())
    close(losses, torch.nn.functional.cross_entropy(logits, torch.arange(6), reduction="none"), scale)
    close(gz.info_nce(a, b, temperature=T, reduction="sum"), losses.sum(), scale * 6)
    close(gz.info_nce(a, b, temperature=T), losses.mean(), scale)


# Which candidates count ----------------------------------------------------------------------------------------------


@given(seed=seeds, T=temperatures)
def test_positives_by_index_and_log_weights(seed, T):
    s = Source(seed)
    a, x, w = s.normal(5, 3), s.normal(8, 3), s.normal(8)
    positive = torch.tensor([7, 0, 3, 3, 1])
    logits = a @ x.mT / T + w
    found = gz.info_nce(a, x, temperature=T, positive=positive, log_weights=w)
    close(found, torch.nn.functional.cross_entropy(logits, positive), 1 + float(logits.abs().max()))


@given(seed=seeds, T=temperatures)
def test_a_positive_of_its_own_is_one_more_candidate(seed, T):
    s = Source(seed)
    a, own, x = s.normal(5, 3), s.normal(5, 3), s.normal(8, 3)
    logits = torch.cat([(a * own).sum(-1, keepdim=True), a @ x.mT], -1) / T
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(5, dtype=torch.long))
    scale = 1 + float(logits.abs().max())
    close(gz.info_nce(a, x, temperature=T, positive=own), expected, scale)
    expected = (logits[:, 1:].logsumexp(-1) - logits[:, 0]).mean()
    close(gz.info_nce(a, x, temperature=T, positive=own, decoupled=True), expected, scale)


@given(seed=seeds, T=temperatures)
def test_ids_and_masks_hide_false_negatives_and_never_the_positive(seed, T):
    s = Source(seed)
    a, x = s.normal(7, 3), s.normal(7, 3)
    logits = a @ x.mT / T
    scale, targets = 1 + float(logits.abs().max()), torch.arange(7)
    eye = torch.eye(7, dtype=torch.bool)
    different = LABELS.unsqueeze(-1) != LABELS
    expected = torch.nn.functional.cross_entropy(logits.masked_fill(~(different | eye), -torch.inf), targets)
    close(gz.info_nce(a, x, temperature=T, ids=LABELS), expected, scale)
    close(gz.info_nce(a, x, temperature=T, mask=different), expected, scale)
    close(gz.info_nce(a, x, temperature=T, ids=(LABELS, LABELS), mask=eye), torch.zeros((), dtype=torch.float64), scale)
    mask = s.normal(7, 7) > 0
    hidden = logits.masked_fill(~((mask & different) | eye), -torch.inf)
    close(
        gz.info_nce(a, x, temperature=T, ids=LABELS, mask=mask),
        torch.nn.functional.cross_entropy(hidden, targets),
        scale,
    )
    decoupled = logits.masked_fill(~different, -torch.inf).logsumexp(-1) - logits.diagonal()
    close(gz.info_nce(a, x, temperature=T, ids=LABELS, decoupled=True), decoupled.mean(), scale)


@given(seed=seeds, T=temperatures, divided=st.booleans())
def test_margins_and_biases_of_pairs(seed, T, divided):
    """The positive counts less by the margin, and each logit has its bias; with gradients, also of a temperature."""
    s = Source(seed)
    a, x, bias = (t.requires_grad_() for t in (s.normal(7, 3), s.normal(7, 3), s.normal(7, 7)))
    t = torch.tensor(T, dtype=torch.float64, requires_grad=True)
    logits = (a @ x.mT - 0.3 * torch.eye(7, dtype=torch.float64)) / t + bias
    scale = 1 + float(logits.detach().abs().max())
    for temperature in (T, t):
        with by_blocks() if divided else contextlib.nullcontext():
            found = gz.info_nce(a, x, temperature=temperature, margin=0.3, bias=bias)
        expected = torch.nn.functional.cross_entropy(logits, torch.arange(7))
        close(found, expected, scale)
        tensors = (a, x, bias) if temperature is T else (a, x, bias, t)
        for actual, wanted in zip(
            torch.autograd.grad(found, tensors), torch.autograd.grad(expected, tensors, retain_graph=True), strict=True
        ):
            close(actual, wanted, scale * (1 + 20 / T**2))
    decoupled = logits.masked_fill(torch.eye(7).bool(), -torch.inf).logsumexp(-1) - logits.diagonal()
    with by_blocks() if divided else contextlib.nullcontext():
        close(gz.info_nce(a, x, temperature=t, margin=0.3, bias=bias, decoupled=True), decoupled.mean(), scale)


def test_cosface_is_a_proxy_loss_with_a_margin():
    s = Source(3)
    a, p, y = s.normal(5, 4), s.normal(3, 4), torch.tensor([0, 2, 1, 1, 0])
    cosines = torch.nn.functional.normalize(a, dim=-1) @ torch.nn.functional.normalize(p, dim=-1).mT
    logits = 64 * (cosines - 0.35 * torch.nn.functional.one_hot(y, 3).double())
    found = gz.contrastive.proxy_loss(a, p, y, temperature=1 / 64, margin=0.35, normalize=True)
    close(found, torch.nn.functional.cross_entropy(logits, y), 100.0)


def test_ids_hide_false_negatives_in_siglip():
    s = Source(4)
    a, x = s.normal(7, 3), s.normal(7, 3)
    logits, eye = a @ x.mT - 1.0, torch.eye(7, dtype=torch.bool)
    counted = (LABELS.unsqueeze(-1) != LABELS) | eye
    each = -torch.nn.functional.logsigmoid(torch.where(eye, logits, -logits)) * counted
    close(gz.siglip(a, x, offset=-1.0, ids=LABELS), each.sum(-1).mean(), 10.0)


def test_pairs_of_one_id_hide_each_other_in_nt_xent():
    s = Source(0)
    a, b, y = s.normal(4, 3), s.normal(4, 3), torch.tensor([0, 1, 0, 2])
    z, labels = torch.cat([a, b]), torch.cat([y, y])
    positive = torch.arange(8).roll(4)
    seen = labels.unsqueeze(-1) != labels
    seen[torch.arange(8), positive] = True
    expected = torch.nn.functional.cross_entropy((z @ z.mT).masked_fill(~seen, -torch.inf), positive)
    close(gz.nt_xent(a, b, ids=y), expected, 10.0)


@given(seed=seeds, T=temperatures, decoupled=st.booleans())
def test_hard_negatives_are_candidates_of_one_anchor(seed, T, decoupled):
    s = Source(seed)
    a, x, hard, w = s.normal(5, 3), s.normal(5, 3), s.normal(5, 2, 3), s.normal(5)
    logits = torch.cat([a @ x.mT + T * w, (hard @ a.unsqueeze(-1)).squeeze(-1)], -1) / T
    rest = logits.masked_fill(torch.eye(5, 7).bool(), -torch.inf).logsumexp(-1) - logits.diagonal()
    expected = rest if decoupled else torch.nn.functional.cross_entropy(logits, torch.arange(5), reduction="none")
    options = {"temperature": T, "log_weights": w, "hard_negatives": hard, "decoupled": decoupled}
    close(gz.info_nce(a, x, **options, reduction="none"), expected, 1 + float(logits.abs().max()))
    close(gz.info_nce(a, x, **options), expected.mean(), 1 + float(logits.abs().max()))


@given(seed=seeds, T=temperatures, divided=st.booleans())
def test_soft_targets(seed, T, divided):
    s = Source(seed)
    a, x, w, targets = s.normal(5, 3), s.normal(7, 3), s.normal(7), s.normal(5, 7).softmax(-1)
    a.requires_grad_()
    targets[0] = torch.nn.functional.one_hot(torch.tensor(3), 7)
    logits = a @ x.mT / T + w
    expected = torch.nn.functional.cross_entropy(logits, targets)
    scale = 1 + float(logits.detach().abs().max())
    with by_blocks() if divided else contextlib.nullcontext():
        found = gz.contrastive.soft_info_nce(a, x, targets, temperature=T, log_weights=w)
        each = gz.contrastive.soft_info_nce(a, x, targets, temperature=T, log_weights=w, reduction="none")
    close(found, expected, scale)
    close(each.mean(), expected, scale)
    close(torch.autograd.grad(found, a)[0], torch.autograd.grad(expected, a)[0], scale * (1 + 10 / T))


@pytest.mark.parametrize("kind", ["out", "inside", "pair"])
@given(seed=seeds, T=temperatures, divided=st.booleans())
def test_supervised_candidates_may_be_other_vectors(kind, seed, T, divided):
    """A queue, or the other tower: several positives, and anchors without one."""
    s = Source(seed)
    a, x = s.normal(4, 3), s.normal(7, 3)
    y = torch.tensor([0, 1, 5, 2])
    logits = a @ x.mT / T
    losses = []
    for i in (0, 1, 3):  # label 5 has no positive
        positive = y[i] == LABELS
        G, others = logits[i].logsumexp(0), logits[i][~positive]
        if kind == "inside":
            losses.append(G - logits[i][positive].logsumexp(0) + math.log(int(positive.sum())))
        elif kind == "out":
            losses.append((G - logits[i][positive]).mean())
        else:
            each = [torch.cat([p.view(1), others]).logsumexp(0) - p for p in logits[i][positive]]
            losses.append(torch.stack(each).mean())
    options = {"inside": {"mean_inside_log": True}, "pair": {"denominator": "pair"}, "out": {}}[kind]
    with by_blocks() if divided else contextlib.nullcontext():
        found = gz.supervised_contrastive(
            a, y, candidates=x, candidate_labels=LABELS, temperature=T, reduction="none", **options
        )
    scale = 1 + float(logits.abs().max())
    close(found[[0, 1, 3]], torch.stack(losses), scale)
    assert float(found[2]) == 0


# Sampled losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
@given(seed=seeds, T=temperatures)
def test_sampled_losses_are_their_definitions(shared, seed, T):
    s = Source(seed)
    a, x, noise = s.normal(4, 3), s.normal(6, 3), s.log_simplex(6)
    positive = torch.tensor([5, 1, 1, 0])
    negatives = torch.tensor([2, 0, 2]) if shared else torch.tensor([[1, 2, 3], [0, 0, 5], [4, 2, 1], [3, 5, 5]])
    constant = s.normal(4)
    sigmoid = torch.nn.functional.logsigmoid
    sampled, contrasted, ranked, most = [], [], [], 1.0
    for i in range(4):
        drawn = negatives if shared else negatives[i]
        plus, minus = a[i] @ x[positive[i]] / T, x[drawn] @ a[i] / T
        most = max(most, float(plus.abs()), float(minus.abs().max()))
        sampled.append(-sigmoid(plus) - sigmoid(-minus).sum())
        data = plus - constant[i] - math.log(3) - noise[positive[i]]
        contrasted.append(-sigmoid(data) - sigmoid(-(minus - constant[i] - math.log(3) - noise[drawn])).sum())
        corrected = torch.cat([(plus - noise[positive[i]]).unsqueeze(0), minus - noise[drawn]])
        ranked.append(corrected.logsumexp(0) - corrected[0])
    options = {"positive": positive, "negatives": negatives, "temperature": T, "reduction": "none"}
    scale = 10 * (1 + most)
    close(gz.contrastive.skip_gram(a, x, **options), torch.stack(sampled), scale)
    close(gz.contrastive.nce(a, x, noise=noise, log_normalizer=constant, **options), torch.stack(contrasted), scale)
    close(gz.contrastive.ranking_nce(a, x, noise=noise, **options), torch.stack(ranked), scale)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32])
def test_indices_and_labels_may_have_any_integer_dtype(dtype):
    """uint8 indices are numbers, although torch takes them for masks."""
    s = Source(0)
    a, x, noise = s.normal(4, 3), s.normal(9, 3), s.log_simplex(9)
    c, index = gz.contrastive, torch.tensor([8, 1, 1, 0])

    def losses(dtype):
        y, labels = index.to(dtype), torch.arange(9).to(dtype)
        drawn = {"positive": y, "negatives": torch.tensor([2, 0, 7]).to(dtype)}
        by_row = {"positive": y, "negatives": torch.arange(8).view(4, 2).to(dtype)}
        family = gz.Likelihood(a, x, positive=y, log_weights=noise)
        return torch.stack([
            gz.info_nce(a, x, positive=y),
            gz.info_nce(a, x, positive=y, decoupled=True, ids=(y, labels)),
            gz.siglip(a, x, positive=y),
            c.skip_gram(a, x, **drawn),
            c.nce(a, x, noise=noise, **by_row),
            c.ranking_nce(a, x, noise=noise, **drawn),
            c.proxy_loss(a, x, y),
            c.proxy_anchor_loss(a, x, y),
            gz.supervised_contrastive(a, y.long(), candidates=x, candidate_labels=labels),
            gz.supervised_contrastive(a, y),
            c.nca(a, y),
            c.linear_cross_entropy(a, x, y).loss,
            family.log_density().sum(),
            family.gradient().sum(),
            c.retrieval_ranks(a, x, positive=y).double().sum(),
        ])  # fmt: skip

    assert torch.equal(losses(dtype), losses(torch.int64))


def test_skip_gram_without_negatives_is_the_full_softmax():
    s = Source(1)
    center, contexts, positive = s.normal(4, 3), s.normal(9, 3), torch.tensor([8, 0, 0, 3])
    expected = torch.nn.functional.cross_entropy(center @ contexts.mT, positive)
    close(gz.contrastive.skip_gram(center, contexts, positive=positive), expected, 10.0)


def test_negative_sampling_is_nce_with_a_noise_of_density_one_over_k():
    s = Source(2)
    center, contexts, positive = s.normal(4, 3), s.normal(9, 3), torch.tensor([8, 0, 0, 3])
    options = {"positive": positive, "negatives": torch.tensor([1, 2, 4, 7, 7])}
    noise = torch.full((9,), -math.log(5), dtype=torch.float64)
    close(
        gz.contrastive.skip_gram(center, contexts, **options),
        gz.contrastive.nce(center, contexts, noise=noise, **options),
        10.0,
    )


def test_nce_learns_the_log_normalizer():
    """With every candidate drawn as often as the noise says, the best constant is G itself."""
    s = Source(3)
    a, x = s.normal(1, 3), s.normal(6, 3)
    G = (x @ a[0]).logsumexp(0)
    p, noise = (x @ a[0] - G).exp(), torch.full((6,), -math.log(6), dtype=torch.float64)

    def expected_loss(c):
        """Over the law of the data, with the six negatives in their proportions."""
        options = {"negatives": torch.arange(6), "noise": noise, "log_normalizer": c, "reduction": "none"}
        anchors = a.expand(6, 3)
        return (p * gz.contrastive.nce(anchors, x, positive=torch.arange(6), **options)).sum()

    slope = torch.func.grad(expected_loss)
    close(slope(G), torch.zeros((), dtype=torch.float64), 10.0)
    assert float(slope(G - 0.3)) < -0.05
    assert float(slope(G + 0.3)) > 0.05


# Limits --------------------------------------------------------------------------------------------------------------


@given(seed=seeds)
def test_triplets_are_the_limit_of_two_candidates(seed):
    s = Source(seed)
    a, x, y = s.normal(6, 3), s.normal(6, 3), s.normal(6, 3)
    behind = 0.2 + (a * y).sum(-1) - (a * x).sum(-1)
    hard = gz.contrastive.triplet_loss(a, x, y, margin=0.2, similarity="dot", reduction="none")
    close(hard, behind.clamp(min=0), 10.0)
    for T in (1.0, 0.1, 1e-3):
        soft = gz.contrastive.triplet_loss(a, x, y, margin=0.2, similarity="dot", temperature=T, reduction="none")
        # The positive and one negative, whose log weight is the margin.
        weights = torch.tensor([0.0, 0.2 / T], dtype=torch.float64)
        for i in range(6):
            both = torch.stack([x[i], y[i]])
            expected = T * gz.info_nce(
                a[i : i + 1], both, temperature=T, positive=torch.tensor([0]), log_weights=weights
            )
            close(soft[i], expected, 10.0)
        assert bool((soft >= hard - 1e-12).all())
        assert bool((soft - hard <= T * math.log(2) + 1e-12).all())


@given(seed=seeds)
def test_triplets_on_the_sphere_are_half_of_those_of_squared_distances(seed):
    s = Source(seed)
    a, x, y = s.normal(6, 3), s.normal(6, 3), s.normal(6, 3)
    u, v, w = (t / t.norm(dim=-1, keepdim=True) for t in (a, x, y))
    expected = ((u - v).square().sum(-1) - (u - w).square().sum(-1) + 0.4).clamp(min=0).mean()
    dots = gz.contrastive.triplet_loss(a, x, y, margin=0.2, similarity="dot", normalize=True)
    close(2 * dots, expected)
    close(gz.contrastive.triplet_loss(a, x, y, margin=0.4, normalize=True), expected)


@given(seed=seeds)
def test_triplets_of_distances_are_those_of_facenet_and_of_torch(seed):
    s = Source(seed)
    a, x, y = s.normal(6, 3), s.normal(6, 3), s.normal(6, 3)
    behind = (a - x).square().sum(-1) - (a - y).square().sum(-1) + 0.3
    close(gz.contrastive.triplet_loss(a, x, y, margin=0.3), behind.clamp(min=0).mean(), 100.0)
    distances = gz.contrastive.triplet_loss(a, x, y, margin=0.3, similarity="distance")
    close(distances, torch.nn.functional.triplet_margin_loss(a, x, y, margin=0.3, eps=0.0), 10.0)


@given(seed=seeds, T=temperatures)
def test_proxies_are_the_limit_of_classes_that_are_one_point(seed, T):
    s = Source(seed)
    a, p, y = s.normal(5, 3), s.normal(4, 3), torch.tensor([0, 3, 1, 1, 2])
    scale = 1 + float((a @ p.mT).abs().max()) / T
    logits = a @ p.mT / T
    close(gz.contrastive.proxy_loss(a, p, y, temperature=T), torch.nn.functional.cross_entropy(logits, y), scale)
    # With k copies of every proxy the mass of the class is the probability of its proxy.
    copies, labels = p.repeat(3, 1), torch.arange(4).repeat(3)
    own = (labels == y.unsqueeze(-1)).double().log()
    s_ = a @ copies.mT / T
    close(
        gz.contrastive.proxy_loss(a, p, y, temperature=T), (s_.logsumexp(-1) - (s_ + own).logsumexp(-1)).mean(), scale
    )
    others = logits.masked_fill(torch.nn.functional.one_hot(y, 4).bool(), -torch.inf)
    first_paper = (others.logsumexp(-1) - logits[torch.arange(5), y]).mean()
    close(gz.contrastive.proxy_loss(a, p, y, temperature=T, decoupled=True), first_paper, scale)


@given(seed=seeds)
def test_alignment(seed):
    s = Source(seed)
    a, b = s.normal(6, 3), s.normal(6, 3)
    close(gz.contrastive.alignment_loss(a, b), (a - b).norm(dim=-1).square().mean(), 10.0)
    close(gz.contrastive.alignment_loss(a, b, exponent=1.0), (a - b).norm(dim=-1).mean(), 10.0)
    u, v = a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
    close(gz.contrastive.alignment_loss(a, b, normalize=True), (2 - 2 * (u * v).sum(-1)).mean(), 10.0)


def test_info_nce_with_many_negatives_is_alignment_and_uniformity():
    """At temperature T on the sphere loss - log n -> alignment / 2T + mean log mean exp(-|x - y|²/2T).   [wang20]"""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 3, generator=g, dtype=torch.float64)
    x = x / x.norm(dim=-1, keepdim=True)
    y = x + 0.1 * torch.randn(4000, 3, generator=g, dtype=torch.float64)
    y = y / y.norm(dim=-1, keepdim=True)
    loss = gz.info_nce(x, y, temperature=0.5)
    log_mean = ((x @ y.mT - 1) / 0.5).exp().mean(-1).log().mean()
    close(loss - math.log(4000), gz.contrastive.alignment_loss(x, y) / (2 * 0.5) + log_mean, 10.0)


def test_nca_is_minus_the_expected_accuracy_if_asked():
    s = Source(5)
    x = s.normal(7, 3)
    p = torch.exp(-(x.unsqueeze(1) - x).square().sum(-1)).fill_diagonal_(0.0)
    p = p / p.sum(-1, keepdim=True)
    own = (p * (LABELS.unsqueeze(-1) == LABELS)).sum(-1)
    close(gz.contrastive.nca(x, LABELS, expected_accuracy=True, reduction="sum"), -own.sum(), 10.0)


# Unusual vectors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-200, 1e-30, 1.0, 1e30, 1e150])
def test_cosines_are_exact_for_vectors_of_any_length(size):
    s = Source(6)
    a, b = s.normal(5, 3), s.normal(5, 3)
    u, v = a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
    x = (a * size).requires_grad_()
    found = gz.info_nce(x, b, temperature=0.1, normalize=True)
    close(found, contrasts.info_nce(u, v, 0.1), 20.0)
    y = a.clone().requires_grad_()
    expected = contrasts.info_nce(y / y.norm(dim=-1, keepdim=True), v, 0.1)
    close(torch.autograd.grad(found, x)[0] * size, torch.autograd.grad(expected, y)[0], 200.0)


def test_the_zero_vector_has_cosine_zero_and_no_gradient():
    s = Source(7)
    a, b = s.normal(4, 3), s.normal(4, 3)
    a[1] = 0
    a.requires_grad_()
    losses = gz.info_nce(a, b, temperature=0.1, normalize=True, reduction="none")
    close(losses[1], torch.tensor(math.log(4), dtype=torch.float64), 20.0)
    (gradient,) = torch.autograd.grad(losses.sum(), a)
    assert bool((gradient[1] == 0).all())
    assert bool(gradient.isfinite().all())


def test_one_pair_alone_and_nothing_but_the_positive_have_loss_zero_and_no_gradient():
    s = Source(8)
    a, b = s.normal(1, 3).requires_grad_(), s.normal(1, 3)
    for loss in (gz.info_nce(a, b), gz.nt_xent(a, b), gz.clip_loss(a, b)):
        close(loss, torch.zeros((), dtype=torch.float64), 10.0)
        close(torch.autograd.grad(loss, a)[0], torch.zeros(1, 3, dtype=torch.float64), 10.0)
    x, y = s.normal(4, 3).requires_grad_(), s.normal(4, 3)
    hidden = gz.info_nce(x, y, temperature=1e-3, ids=torch.zeros(4, dtype=torch.long))
    close(hidden, torch.zeros((), dtype=torch.float64), 1e4)
    close(torch.autograd.grad(hidden, x)[0], torch.zeros(4, 3, dtype=torch.float64), 1e4)


def test_vectors_without_a_partner_are_left_out():
    s = Source(9)
    z, y = s.normal(5, 3), torch.tensor([0, 0, 1, 2, 3])
    for loss in (gz.supervised_contrastive, gz.contrastive.nca):
        losses = loss(z, y, reduction="none")
        assert bool((losses[2:] == 0).all())
        close(loss(z, y), losses[:2].mean(), 10.0)


def test_anchors_whose_circle_loss_vanishes_count_in_the_mean():
    """The losses of separated classes are 0 in float32; only anchors without a positive are excluded."""
    vectors, labels = torch.eye(5).repeat_interleave(2, 0)[:9], torch.tensor([0, 0, 1, 1, 2, 2, 3, 4, 4])
    vectors[5] = vectors[0]
    chosen = (torch.tensor([0, 4]), torch.tensor([1, 5]), torch.tensor([0, 4]), torch.tensor([2, 0]))
    for pairs, anchors in ((None, 8), (chosen, 2)):
        losses, mean = (
            gz.contrastive.circle_loss(vectors, labels, scale=512.0, pairs=pairs, reduction=how)
            for how in ("none", "mean")
        )
        assert int((losses > 0).sum()) < anchors
        close(mean, losses.sum() / anchors, float(mean))


def test_half_precision_is_computed_in_float32():
    s = Source(10, torch.float32)
    a, b = s.normal(6, 8).bfloat16().requires_grad_(), s.normal(6, 8).bfloat16()
    loss = gz.info_nce(a, b, temperature=0.01)
    assert loss.dtype == torch.float32
    close(loss.detach(), contrasts.info_nce(a.detach().float(), b.float(), 0.01), 1000.0)
    assert torch.autograd.grad(loss, a)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["info_nce", "clip_loss", "nt_xent", "siglip", "supervised_contrastive"])
def test_vectors_may_meet_in_half_precision(name):
    """The loss of vectors that were rounded where they meet, the gradient in float32."""
    g = torch.Generator().manual_seed(12)
    a, b = (torch.nn.functional.normalize(torch.randn(40, 32, generator=g), dim=-1).requires_grad_() for _ in range(2))

    def loss(x, y, **options):
        operands = (x + y, torch.arange(40) // 4) if name == "supervised_contrastive" else (x, y)
        return getattr(gz.contrastive, name)(*operands, **options)

    exact = loss(a, b, temperature=0.1)
    for precision, error in ((torch.bfloat16, 2**-9), (torch.float16, 2**-12)):
        found = loss(a, b, temperature=0.1, precision=precision)
        assert float((found - exact).detach().abs()) < 10 * error * max(1.0, float(exact.detach()))
        each, rounded = (loss(a, b, temperature=0.1, precision=p, reduction="none") for p in (None, precision))
        assert (each != rounded).any()
        for actual, expected in zip(
            torch.autograd.grad(found, (a, b)), torch.autograd.grad(exact, (a, b), retain_graph=True), strict=True
        ):
            assert actual.dtype == torch.float32
            close(actual, expected, float(expected.abs().max()) * error * 3e6)
        (again,) = torch.autograd.grad(loss(a, b, temperature=0.1, precision=precision), a, create_graph=True)
        assert again.requires_grad


# The module ----------------------------------------------------------------------------------------------------------


def test_the_module_learns_its_temperature():
    s = Source(11, torch.float32)
    a, b = s.normal(6, 8), s.normal(6, 8)
    module = gz.contrastive.Contrastive("info_nce", temperature=0.5, learn_temperature=True)
    close(module(a, b).detach(), contrasts.info_nce(a, b, 0.5), 20.0)
    module(a, b).backward()
    t = torch.tensor(0.5, requires_grad=True)
    (slope,) = torch.autograd.grad(contrasts.info_nce(a, b, t), t)
    close(module.log_temperature.grad, 0.5 * slope, 100.0)
    assert list(gz.contrastive.Contrastive("nt_xent", temperature=0.5).parameters()) == []
    again = gz.contrastive.Contrastive("info_nce", learn_temperature=True)
    again.load_state_dict(module.state_dict())
    assert again.temperature.item() == pytest.approx(0.5)
    assert repr(module) == "Contrastive(info_nce, temperature=0.5, learn_temperature=True)"
    options = gz.contrastive.Contrastive("n_pair", temperature=0.25, minimum=0.01, normalize=True)
    assert (
        repr(options) == "Contrastive(n_pair, temperature=0.25, learn_temperature=False, minimum=0.01, normalize=True)"
    )
    close(options(a, b, normalize=False), contrasts.info_nce(a, b, 0.25), 20.0)  # a call overrides an option
    own = gz.contrastive.Contrastive(lambda a, b, temperature: (a - b).sum() * temperature, temperature=2.0)
    close(own(a, b), 2 * (a - b).sum(), 100.0)
