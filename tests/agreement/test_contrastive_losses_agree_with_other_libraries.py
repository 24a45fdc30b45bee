"""The table of conventions in docs/contrastive.md, line by line: what stands on its right is what stands on its left.

pytorch-metric-learning is run. lightly and open_clip need torchvision: their formulas are written out from their
documentation.
"""

import re
from pathlib import Path

import pytest
import torch
from pytorch_metric_learning import losses, miners
from torch.nn.functional import cross_entropy, logsigmoid, normalize

import gradlogz as gz
from support import contrastive_definitions as contrasts
from support.scales import close

PAGE = Path(__file__).parents[2] / "docs" / "contrastive.md"
T, PAIRS = 0.1, 7


def vectors(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


NAMES = {
    "a": vectors(PAIRS, 5),
    "b": vectors(PAIRS, 5, seed=1),
    "z": vectors(9, 5, seed=2),
    "y": torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2]),
    "p": vectors(3, 5, seed=3),
    "k": vectors(11, 5, seed=4),
    "T": T,
}
a, b, z, y, p, k = (NAMES[name] for name in "abzypk")
u, v = normalize(a, dim=-1), normalize(b, dim=-1)
targets = torch.arange(PAIRS)


def proxies(loss, weight):
    """A loss of pytorch-metric-learning with these proxies."""
    getattr(loss, weight).data = p.clone() if weight == "proxies" else p.mT.clone()
    return loss(z, y)


def memory_bank():
    """Positive first, then the bank."""
    logits = torch.cat([(u * v).sum(-1, keepdim=True), u @ normalize(k, dim=-1).mT], -1) / T
    return cross_entropy(logits, torch.zeros(PAIRS, dtype=torch.long))


def hypersphere():
    def uniformity(x):
        return torch.pdist(x).square().neg().exp().mean().log()

    return (u - v).norm(dim=-1).square().mean() + (uniformity(u) + uniformity(v)) / 2


def clip():
    """Logits per image and per text, the scale exp(logit_scale) = 1/T."""
    per_image = (1 / T) * u @ v.mT
    return (cross_entropy(per_image, targets) + cross_entropy(per_image.mT, targets)) / 2


def sigmoid():
    """-sum log sigmoid(±(scale <image, text> + bias)), divided by the number of images."""
    logits = u @ v.mT / T - 10.0
    signs = 2 * torch.eye(PAIRS, dtype=torch.float64) - 1
    return -logsigmoid(signs * logits).sum() / PAIRS


METRIC, LIGHTLY, CLIP = "pytorch-metric-learning", "lightly", "open_clip"
THEIRS = {
    ("SimCLR [chen20]", "NT-Xent"): lambda: contrasts.nt_xent(u, v, T),
    (METRIC, "NTXentLoss, two views"): lambda: losses.NTXentLoss(T)(torch.cat([a, b]), targets.repeat(2)),
    (METRIC, "NTXentLoss, labels"): lambda: losses.NTXentLoss(T)(z, y),
    (METRIC, "SelfSupervisedLoss(NTXentLoss)"): lambda: losses.SelfSupervisedLoss(losses.NTXentLoss(T))(a, b),
    (METRIC, "SupConLoss"): lambda: losses.SupConLoss(T)(z, y),
    (METRIC, "NPairsLoss"): lambda: losses.NPairsLoss()(torch.cat([a, b]), targets.repeat(2)),
    (METRIC, "NCALoss"): lambda: losses.NCALoss()(z, y),
    (METRIC, "ProxyNCALoss"): lambda: proxies(losses.ProxyNCALoss(3, 5), "proxies"),
    (METRIC, "NormalizedSoftmaxLoss"): lambda: proxies(losses.NormalizedSoftmaxLoss(3, 5, T), "W"),
    (METRIC, "MultiSimilarityLoss"): lambda: losses.MultiSimilarityLoss()(z, y),
    (METRIC, "CircleLoss"): lambda: losses.CircleLoss()(z, y),
    (METRIC, "ProxyAnchorLoss"): lambda: proxies(losses.ProxyAnchorLoss(3, 5), "proxies"),
    (LIGHTLY, "NTXentLoss"): lambda: contrasts.nt_xent(u, v, T),
    (LIGHTLY, "NTXentLoss, memory bank"): memory_bank,
    (LIGHTLY, "DCLLoss"): lambda: contrasts.nt_xent(u, v, T, decoupled=True),
    (LIGHTLY, "HypersphereLoss"): hypersphere,
    (CLIP, "ClipLoss"): clip,
    (CLIP, "SigLipLoss"): sigmoid,
}


def table():
    """(whose, loss): the expression that is the same here."""
    text = PAGE.read_text().split("<!-- conventions -->")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.strip().splitlines()[2:]]
    return {(whose, loss): re.fullmatch(r"`(.*)`", ours)[1] for whose, loss, ours in rows}


def test_the_table_and_the_oracles_are_of_the_same_losses():
    assert list(table()) == list(THEIRS)


@pytest.mark.filterwarnings("ignore")  # of the other library
@pytest.mark.parametrize("line", THEIRS, ids=" ".join)
def test_both_sides_of_a_line_are_equal(line):
    ours = eval(table()[line], {**vars(gz.contrastive), **NAMES})
    close(ours.detach(), THEIRS[line]().detach(), 1 + 2 / T)


@pytest.mark.filterwarnings("ignore")
def test_low_temperatures_are_exact_where_another_library_has_a_ceiling():
    x, y = (vectors(32, 2, seed=s).float() for s in (5, 6))
    exact = float(contrasts.nt_xent(normalize(x.double(), dim=-1), normalize(y.double(), dim=-1), 0.01))
    ours = float(gz.nt_xent(x, y, temperature=0.01, normalize=True))
    theirs = float(losses.NTXentLoss(0.01)(torch.cat([x, y]), torch.arange(32).repeat(2)))
    assert ours == pytest.approx(exact, rel=1e-5)
    assert exact > 99
    assert theirs < 90  # no pair can count for more than -log of the smallest float32, 87
    each = gz.nt_xent(x, y, temperature=0.01, normalize=True, reduction="none")
    assert theirs == pytest.approx(float(each.clamp(max=87.336544).mean()), rel=1e-3)


MINED = {
    "pairs": miners.MultiSimilarityMiner(epsilon=0.3),
    "triplets": miners.TripletMarginMiner(margin=-0.2, type_of_triplets="all"),
}
WITH_PAIRS = {
    "supervised_contrastive": (losses.SupConLoss(T), {"temperature": T}),
    "multi_similarity_loss": (losses.MultiSimilarityLoss(1.5, 20, 0.4), {"alpha": 1.5, "beta": 20.0, "base": 0.4}),
    "circle_loss": (losses.CircleLoss(0.3, 30), {"relaxation": 0.3, "scale": 30.0}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MINED)
@pytest.mark.parametrize("name", WITH_PAIRS)
def test_indices_of_miners_choose_the_pairs(name, kind):
    """Value and gradient with the pairs that a miner of the other library has chosen."""
    theirs, options = WITH_PAIRS[name]
    mined = MINED[kind](z, y)
    x = z.clone().requires_grad_()
    loss = getattr(gz.contrastive, name)
    ours, with_all = (loss(x, y, pairs=chosen, normalize=True, **options) for chosen in (mined, None))
    assert abs(float((ours - with_all).detach())) > 1e-3
    expected = theirs(x, y, mined)
    close(ours.detach(), expected.detach(), 100.0)
    close(*(torch.autograd.grad(loss, x)[0] for loss in (ours, expected)), 1000.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["multi_similarity_loss", "circle_loss", "proxy_anchor_loss"])
def test_gradients_of_weighted_pairs(name):
    """Also those of proxies; the circle loss has no gradients in its weights."""
    x, w = z.clone().requires_grad_(), p.clone().requires_grad_()
    if name == "proxy_anchor_loss":
        theirs = losses.ProxyAnchorLoss(3, 5, margin=0.2, alpha=16)
        theirs.proxies.data = p.clone()
        mine = torch.autograd.grad(
            gz.contrastive.proxy_anchor_loss(x, w, y, margin=0.2, scale=16.0, normalize=True), (x, w)
        )
        other = torch.autograd.grad(theirs(x, y), (x, theirs.proxies))
    else:
        theirs = losses.CircleLoss() if name == "circle_loss" else losses.MultiSimilarityLoss()
        mine = torch.autograd.grad(getattr(gz.contrastive, name)(x, y, normalize=True), x)
        other = torch.autograd.grad(theirs(x, y), x)
    for actual, expected in zip(mine, other, strict=True):
        close(actual, expected, 1000.0)
