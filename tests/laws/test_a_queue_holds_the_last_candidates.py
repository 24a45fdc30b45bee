"""A queue holds the last vectors that were put in, in memory of its own, and its loss is that of MoCo.   [he20]"""

import torch
from hypothesis import given
from hypothesis import strategies as st

import gradlogz as gz
from support.scales import close


@given(size=st.integers(1, 7), batches=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_it_holds_the_last_ones(size, batches):
    queue, everything = gz.contrastive.Queue(size, 2, dtype=torch.float64), torch.empty(0, 2, dtype=torch.float64)
    for count in batches:
        vectors = torch.randn(count, 2, dtype=torch.float64)
        queue.put(vectors, torch.arange(count))
        everything = torch.cat([everything, vectors])
        last = everything[-size:]
        assert len(queue) == len(last)
        held = {tuple(v) for v in queue.candidates.tolist()}
        assert held == {tuple(v) for v in last.tolist()}


def test_its_loss_is_that_of_the_positive_and_the_queue():
    queue = gz.contrastive.Queue(5, 3, dtype=torch.float64)
    queue.put(torch.randn(8, 3, dtype=torch.float64))
    a, key = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    logits = torch.cat([(a * key).sum(-1, keepdim=True), a @ queue.vectors.mT], -1) / 0.07
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
    close(gz.info_nce(a, queue.candidates, positive=key, temperature=0.07), expected, 100.0)


def test_labels_hide_candidates_of_the_same_label():
    queue = gz.contrastive.Queue(5, 3, dtype=torch.float64)
    queue.put(torch.randn(2, 3, dtype=torch.float64))
    queue.put(torch.randn(3, 3, dtype=torch.float64), torch.tensor([0, 1, 0]))
    assert queue.labels.tolist() == [-1, -1, 0, 1, 0]
    a, key = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    own = torch.tensor([0, 1])
    hidden = own.unsqueeze(-1) == queue.labels
    logits = torch.cat([(a * key).sum(-1, keepdim=True), (a @ queue.candidates.mT).masked_fill(hidden, -torch.inf)], -1)
    expected = torch.nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long))
    close(gz.info_nce(a, queue.candidates, positive=key, ids=(own, queue.labels)), expected, 100.0)


def test_the_backward_pass_is_not_changed_by_what_comes_next():
    queue = gz.contrastive.Queue(4, 3)
    queue.put(torch.randn(4, 3))
    a = torch.randn(4, 3, requires_grad=True)
    loss = gz.info_nce(a, queue.candidates, positive=torch.randn(4, 3))
    (expected,) = torch.autograd.grad(loss, a, retain_graph=True)
    queue.put(torch.randn(2, 3))
    (again,) = torch.autograd.grad(loss, a)
    assert torch.equal(expected, again)


def test_it_is_saved_and_restored():
    queue, other = gz.contrastive.Queue(4, 3), gz.contrastive.Queue(4, 3)
    queue.put(torch.randn(6, 3))
    queue.put(torch.randn(1, 3))
    other.load_state_dict(queue.state_dict())
    for q in (queue, other):
        q.put(torch.ones(1, 3))
    assert len(other) == 4
    assert torch.equal(queue.candidates, other.candidates)


def test_an_empty_queue_has_no_negatives():
    """The loss comes before `put`: in the first step there is only the positive."""
    queue = gz.contrastive.Queue(8, 3)
    a, key = torch.randn(4, 3, requires_grad=True), torch.randn(4, 3)
    for normalize in (True, False):
        loss = gz.info_nce(a, queue.candidates, positive=key, temperature=0.07, normalize=normalize)
        assert float(loss.detach()) == 0
        assert bool((torch.autograd.grad(loss, a)[0] == 0).all())


def test_a_positive_in_the_queue_would_be_its_own_negative():
    """The order of the documentation has no floor of log 2."""
    queue, a = gz.contrastive.Queue(64, 16), torch.nn.functional.normalize(torch.randn(8, 16), dim=-1)
    queue.put(torch.nn.functional.normalize(torch.randn(8, 16), dim=-1))
    assert float(gz.info_nce(a, queue.candidates, positive=a, temperature=0.01)) < 1e-6
    queue.put(a)
    assert float(gz.info_nce(a, queue.candidates, positive=a, temperature=0.01)) > 0.69
