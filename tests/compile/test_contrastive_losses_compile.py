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


def found(function, dtype=torch.float64):
    a, b = torch.randn(6, 16, dtype=dtype), torch.randn(6, 16, dtype=dtype)
    operands = [a.requires_grad_(), b.requires_grad_(), torch.tensor(0.3, dtype=dtype, requires_grad=True)]
    loss = function(*operands)
    return [t.detach() for t in (loss, *torch.autograd.grad(loss, operands))]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)  # float32 has kernels of its own
@pytest.mark.parametrize("name", LOSSES)
def test_forward_and_backward_compile_into_one_graph(name, dtype):
    torch.manual_seed(1)
    expected = found(LOSSES[name], dtype)
    torch.manual_seed(1)
    for actual, wanted in zip(
        found(torch.compile(LOSSES[name], fullgraph=True, backend="aot_eager"), dtype), expected, strict=True
    ):
        close(actual, wanted, 1000.0 if dtype is torch.float64 else 10.0)
