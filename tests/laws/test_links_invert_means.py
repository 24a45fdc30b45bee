"""The links of `LinkAttention` invert the means of their families; with the Gaussian one it is ordinary attention.

[theory 3.6] On the right: the measures of the library and their duals, torch.nn.MultiheadAttention.
"""

import pytest
import torch
from torch import nn

import gradlogz as gz
from support.measure_registry import Source
from support.scales import close

B, N, E, H, D = 2, 5, 8, 2, 4
MEASURES = {
    "gaussian": lambda: gz.Gaussian.diagonal(torch.zeros(D).double(), torch.ones(D).double()),
    "poisson": lambda: gz.Poisson(torch.ones(D).double()),
    "gamma": lambda: gz.Gamma(torch.ones(D).double(), torch.ones(D).double()),
    "spins": lambda: gz.Spins(torch.zeros(D).double()),
    "one_hot": lambda: gz.OneHot(torch.zeros(D).double().log_softmax(0)),
    "sphere": lambda: gz.Sphere(D, torch.ones(()).double()),
}
FAMILIES = list(MEASURES)


def tokens(family, seed=0, size=1.0):
    """Means of the family, in each head: of natural parameters that are random, below 1 for the gamma family."""
    eta = size * Source(seed).normal(B, N, H, D)
    if family == "gamma":
        eta = 1 - eta.exp()
    return MEASURES[family]().mean(eta).flatten(-2)


def layer_of(family, **options):
    torch.manual_seed(1)
    return gz.LinkAttention(E, H, family=family, dtype=torch.float64, **options)


@pytest.mark.parametrize("size", [1e-3, 1.0, 3.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_link_is_the_inverse_of_the_mean(family, size):
    u = tokens(family, size=size)
    eta = layer_of(family, margin=1e-12).link(u).unflatten(-1, (H, D))
    scale = 1 + eta.abs().max()
    close(MEASURES[family]().mean(eta).flatten(-2), u, scale * (1 + u.abs().max()))
    if size <= 1:  # beyond, a family is saturated and Newton's method in eta loses the digits
        close(eta, gz.measures.mean_to_natural(MEASURES[family](), u.unflatten(-1, (H, D))), scale, tolerance=1e-8)


@pytest.mark.parametrize("d", [2, 3, 16, 64])
def test_the_link_of_the_sphere_is_exact_in_many_dimensions(d):
    layer = gz.LinkAttention(d, 1, family="sphere", dtype=torch.float64)
    direction = nn.functional.normalize(Source(d).normal(6, d), dim=-1)
    lengths = torch.tensor([0.0, 1e-9, 1e-3, 0.3, 0.9, 0.9999], dtype=torch.float64).unsqueeze(-1)
    u = lengths * direction
    eta = layer.link(u)
    close(gz.Sphere(d, torch.ones(()).double()).mean(eta), u, 100.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_derivative_of_the_link_is_the_inverse_fisher_information(family):
    """∇²G* = F⁻¹, in the directions in which the family extends."""
    u, h = tokens(family)[0, 0], MEASURES[family]()
    layer = layer_of(family, validate=False)
    jacobian = torch.autograd.functional.jacobian(layer.link, u)[:D, :D]
    F = h.covariance(layer.link(u)[:D])
    P = torch.eye(D, dtype=torch.float64)
    if family == "one_hot":
        P = P - 1 / D
    close(P @ jacobian @ F @ P, P, 1e3 * (1 + jacobian.abs().max()))


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_attention_with_linked_queries(family):
    u, y = tokens(family), tokens(family, seed=1)
    for project in (True, False):
        layer = layer_of(family, project=project)
        eta = gz.measures.mean_to_natural(MEASURES[family](), u.unflatten(-1, (H, D))).flatten(-2)
        q, k = (layer.q_proj(eta), layer.k_proj(y)) if project else (eta, y)
        q, k, v = (t.reshape(B, N, H, D).transpose(1, 2) for t in (q, k, layer.v_proj(y)))
        p = (q @ k.mT / D**0.5).softmax(-1)
        expected = layer.out_proj((p @ v).transpose(1, 2).reshape(B, N, E))
        output, heads = layer.attend(u, y)
        close(output, expected, 100.0, tolerance=1e-9)
        close(heads.entropy, -(p * p.log()).sum(-1), 100.0, tolerance=1e-9)


def test_with_the_gaussian_family_it_is_ordinary_attention():
    layer, u, y = layer_of("gaussian"), tokens("gaussian"), tokens("gaussian", seed=1)
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([p.weight for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
        theirs.in_proj_bias.copy_(torch.cat([p.bias for p in (layer.q_proj, layer.k_proj, layer.v_proj)]))
        theirs.out_proj.load_state_dict(layer.out_proj.state_dict())
    close(layer(u, y), theirs(u, y, y)[0], 100.0)


def test_members_of_a_family_differ_by_a_translation():
    """Another base measure moves eta by a constant: Spins(b) has the link atanh u - b.   [shim22, Prop. 1b]"""
    u, b = tokens("spins").unflatten(-1, (H, D)), Source(3).normal(D)
    moved = gz.measures.mean_to_natural(gz.Spins(b), u).flatten(-2)
    close(moved, layer_of("spins").link(u.flatten(-2)) - b.repeat(H), 100.0, tolerance=1e-9)


BORDER = {
    "poisson": [0.0, 1.0, 2.0, 0.0],
    "gamma": [0.0, 1.0, 2.0, 0.0],
    "spins": [1.0, -1.0, 0.0, 0.5],
    "one_hot": [0.0, 1.0, 0.0, 0.0],
    "sphere": [0.0, 1.0, 0.0, 0.0],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", BORDER)
def test_tokens_on_the_border_have_finite_links_and_gradients(family, dtype):
    u = torch.tensor(BORDER[family], dtype=dtype).repeat(H).expand(N, E).clone().requires_grad_()
    layer = gz.LinkAttention(E, H, family=family, dtype=dtype)
    output = layer(u)
    assert bool(output.isfinite().all())
    assert bool(torch.autograd.grad(output.sum(), u)[0].isfinite().all())


@pytest.mark.parametrize("family", FAMILIES)
def test_masks_leave_keys_out_and_a_row_may_be_empty(family):
    layer, u, y = layer_of(family), tokens(family), tokens(family, seed=1)
    mask = torch.tensor([True, False, True, True, False])
    close(layer(u, y, attn_mask=mask), layer(u, y[:, mask]), 100.0)
    empty = layer(u, y, attn_mask=torch.zeros(N, N, dtype=torch.bool))
    close(empty, layer.out_proj.bias.expand(B, N, E), 1.0)
    close(layer(u[0], y[0]), layer(u, y)[0], 100.0)
