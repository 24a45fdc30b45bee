"""Contrastive losses compile into one graph, forward and backward."""

import pytest
import torch

import gradlogz as gz
from support.scales import close

LABELS = torch.tensor([0, 1, 0, 2, 1, 0])
LOSSES = {
    "info_nce": lambda a, b, t: gz.info_nce(a, b, temperature=t),
    "weights": lambda a, b, t: gz.info_nce(a, b, temperature=t, positive=LABELS, log_weights=b.square().sum(-1)),
    "labels": lambda a, b, t: gz.info_nce(a, b, temperature=t, ids=LABELS),
    "clip": lambda a, b, t: gz.clip_loss(a, b, temperature=t),
    "nt_xent": lambda a, b, t: gz.nt_xent(a, b, temperature=t, normalize=True),
    "supervised": lambda a, b, t: gz.supervised_contrastive(a + b, LABELS, temperature=t),
    "nca": lambda a, b, t: gz.contrastive.nca(a + b, LABELS, temperature=t),
    "bernoulli": lambda a, b, t: gz.siglip(a, b, temperature=t, offset=-1.0),
}


def found(function):
    a, b = torch.randn(6, 16, dtype=torch.float64), torch.randn(6, 16, dtype=torch.float64)
    operands = [a.requires_grad_(), b.requires_grad_(), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)]
    loss = function(*operands)
    return [t.detach() for t in (loss, *torch.autograd.grad(loss, operands))]


@pytest.mark.parametrize("name", LOSSES)
def test_forward_and_backward_compile_into_one_graph(name):
    torch.manual_seed(1)
    expected = found(LOSSES[name])
    torch.manual_seed(1)
    for actual, wanted in zip(
        found(torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager")), expected, strict=True
    ):
        close(actual, wanted, 1000.0)
