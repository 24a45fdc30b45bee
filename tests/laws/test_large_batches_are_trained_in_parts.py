"""Gradients in parts are those of the whole batch, truncated losses add up, and ranks are those of sorting."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import gradlogz as gz
from support.measure_registry import Source, seeds
from support.scales import close

c = gz.contrastive


def towers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2)).double(), nn.Linear(3, 2).double()


def test_cached_gradients_are_those_of_the_whole_batch():
    s = Source(0)
    x, y = s.normal(7, 3), s.normal(7, 3)
    loss = c.Contrastive("clip_loss", 0.3, True).double()
    one, other = towers()
    torch.manual_seed(1)
    parts = [[x[:3], x[3:6], x[6:]], [y[:4], y[4:]]]
    value = c.cached_backward(loss, [one, other], parts)
    found = [p.grad.clone() for m in (one, other, loss) for p in m.parameters()]
    after = torch.rand(1)
    one, other = towers()
    loss.zero_grad()
    torch.manual_seed(1)  # the same dropout, part by part
    outputs = [torch.cat([m(p) for p in batch]) for m, batch in zip((one, other), parts, strict=True)]
    expected = loss(*outputs)
    expected.backward()
    close(value, expected.detach(), 10.0)
    for actual, wanted in zip(found, (p.grad for m in (one, other, loss) for p in m.parameters()), strict=True):
        close(actual, wanted, 100.0)
    assert torch.equal(after, torch.rand(1))  # random numbers continue as after one pass


def test_matryoshka_losses_add_up():
    s = Source(1)
    a, b = s.normal(5, 8), s.normal(5, 8)
    found = c.matryoshka_loss(lambda x, y: gz.info_nce(x, y, normalize=True), a, b, dims=(8, 4, 2), weights=(1, 0.5, 2))
    parts = [gz.info_nce(a[:, :d], b[:, :d], normalize=True) for d in (8, 4, 2)]
    close(found, parts[0] + 0.5 * parts[1] + 2 * parts[2], 10.0)
    close(c.matryoshka_loss(gz.info_nce, a, b, dims=(8,)), gz.info_nce(a, b), 10.0)


@given(seed=seeds, n=st.integers(1, 9))
def test_ranks_are_those_of_sorting(seed, n):
    s = Source(seed)
    a, x = s.normal(6, 3), s.normal(n, 3)
    positive = torch.arange(6) % n
    logits = a @ x.mT
    order = logits.argsort(-1, descending=True)
    expected = (order == positive.unsqueeze(-1)).long().argmax(-1)
    assert torch.equal(c.retrieval_ranks(a, x, positive=positive), expected)
    recall = c.recall_at(a, x, k=(1, 3), positive=positive)
    assert recall == {k: float((expected < k).double().mean()) for k in (1, 3)}
    unit = torch.nn.functional.normalize(x, dim=-1)
    found = c.retrieval_ranks(a, x, positive=positive, normalize=True)
    assert torch.equal(found, c.retrieval_ranks(a, unit, positive=positive))
    a[0] = torch.nan  # the anchor of a model that has diverged finds nothing
    assert c.retrieval_ranks(a, x, positive=positive).tolist() == [len(x), *expected[1:].tolist()]
