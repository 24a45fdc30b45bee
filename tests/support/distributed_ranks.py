"""Work of each of two processes that share a contrastive batch, and the results it saves."""

import itertools
from datetime import timedelta

import torch
from torch import distributed, nn

import gradlogz as gz
from gradlogz.contrastive import ring as ring_module

SIZES = (5, 3)  # numbers of vectors of the two processes


def batch():
    """Return the complete batch, equal in all processes."""
    g = torch.Generator().manual_seed(0)
    return (torch.randn(sum(SIZES), 4, generator=g, dtype=torch.float64) for _ in range(2))


def encoder():
    torch.manual_seed(1)
    return nn.Linear(4, 3, bias=False, dtype=torch.float64)


class WithQueue(nn.Module):
    """An encoder that puts its outputs into a queue, as a module that DistributedDataParallel wraps."""

    def __init__(self):
        super().__init__()
        self.encoder, self.queue = nn.Linear(1, 1), gz.contrastive.Queue(6, 1)

    def forward(self, key, labels):
        self.queue.put(key, labels)
        return self.encoder(key)


def queue_after_two_steps(rank):
    """Vectors and labels of the queue after steps with one (rank 0) or two (rank 1) vectors; buffers are broadcast."""
    model = nn.parallel.DistributedDataParallel(WithQueue())
    for step in range(2):
        key = torch.full((rank + 1, 1), 10.0 * step + rank)
        model(key, torch.full((rank + 1,), 10 * step + rank)).sum().backward()
    model(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))  # a forward pass broadcasts the buffers first
    queue = model.module.queue
    return queue.candidates.flatten().tolist(), queue.labels.tolist()


LABELS = torch.tensor([0, 1, 0, 2, 1, 0, 1, 3])  # of the pairs of all processes
APART = {5: torch.tensor([0, 0, 1, 1, 1]), 3: torch.tensor([2, 3, 4])}  # the second process has no positives
APART[8] = torch.cat((APART[5], APART[3]))
# Losses with `group`, of two views, the labels of their pairs, and a group or None.
GROUPED = {
    "info_nce": lambda a, b, _, g: gz.info_nce(a, b, temperature=0.3, group=g),
    "index": lambda a, b, _, g: gz.info_nce(a, b, positive=torch.arange(len(a)), temperature=0.3, group=g),
    "ids": lambda a, b, y, g: gz.info_nce(a, b, ids=y, log_weights=b[:, 0], temperature=0.3, group=g),
    "clip_loss": lambda a, b, y, g: gz.clip_loss(a, b, ids=y, temperature=0.3, group=g),
    "nt_xent": lambda a, b, _, g: gz.nt_xent(a, b, temperature=0.3, normalize=True, group=g),
    "nt_xent, ids": lambda a, b, y, g: gz.nt_xent(a, b, ids=y, temperature=0.3, group=g),
    "nt_xent, bfloat16": lambda a, b, _, g: gz.nt_xent(a, b, temperature=0.3, precision=torch.bfloat16, group=g),
    "supervised": lambda a, b, y, g: gz.supervised_contrastive(a + b, y, temperature=0.3, group=g),
    "no positives": lambda a, b, _, g: gz.supervised_contrastive(a + b, APART[len(a)], temperature=0.3, group=g),
    "candidates": lambda a, b, y, g: gz.supervised_contrastive(
        a, y, candidates=b, candidate_labels=y, temperature=0.3, group=g
    ),
    "siglip": lambda a, b, y, g: gz.siglip(a, b, ids=y, temperature=0.3, offset=-1.0, group=g),
    "nca": lambda a, b, y, g: gz.contrastive.nca(a + b, y, group=g),
    "accuracy": lambda a, b, y, g: gz.contrastive.nca(a + b, y, expected_accuracy=True, group=g),
    "multi-similarity": lambda a, b, y, g: gz.contrastive.multi_similarity_loss(a + b, y, normalize=True, group=g),
    "circle": lambda a, b, y, g: gz.contrastive.circle_loss(a + b, y, scale=4.0, normalize=True, group=g),
}


# Losses with `ring`, of two views, the labels of their pairs, and options.
RING = {
    "info_nce": lambda a, b, _, **o: gz.info_nce(a, b, temperature=0.3, **o),
    "ids": lambda a, b, y, **o: gz.info_nce(a, b, ids=y, log_weights=b[:, 0], temperature=0.3, **o),
    "vectors": lambda a, b, _, **o: gz.info_nce(a, b, positive=b.roll(1, -1), temperature=0.3, **o),
    "hard negatives": lambda a, b, _, **o: gz.info_nce(
        a, b, hard_negatives=(a - b).unsqueeze(1), margin=0.2, temperature=0.3, **o
    ),
    "n_pair": lambda a, b, _, **o: gz.contrastive.n_pair(a, b, normalize=True, **o),
    "clip_loss": lambda a, b, y, **o: gz.clip_loss(a, b, ids=y, temperature=0.3, **o),
    "nt_xent": lambda a, b, _, **o: gz.nt_xent(a, b, temperature=0.3, normalize=True, **o),
    "nt_xent, ids": lambda a, b, y, **o: gz.nt_xent(a, b, ids=y, temperature=0.3, **o),
    "decoupled": lambda a, b, _, **o: gz.nt_xent(a, b, decoupled=True, margin=0.1, temperature=0.3, **o),
    "supervised": lambda a, b, y, **o: gz.supervised_contrastive(a + b, y, temperature=0.3, **o),
    "candidates": lambda a, b, y, **o: gz.supervised_contrastive(
        a, y, candidates=b, candidate_labels=y, temperature=0.3, **o
    ),
    "inside": lambda a, b, y, **o: gz.supervised_contrastive(a + b, y, mean_inside_log=True, temperature=0.3, **o),
    "pair": lambda a, b, y, **o: gz.supervised_contrastive(a + b, y, denominator="pair", temperature=0.3, **o),
    "siglip": lambda a, b, y, **o: gz.siglip(a, b, ids=y, temperature=0.3, offset=OFFSET, **o),
}
OFFSET = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
RING_SIZES = (4, 1, 3)  # numbers of pairs of three processes


def ring_results(x, y, labels, **options):
    """Value and gradients of each loss in the encoder, a learned temperature and an offset, averaged over processes."""
    results = {}
    for name, loss in RING.items():
        model = encoder()
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)  # 1 / sqrt(temperature)
        value = loss(model(x) * scale, model(y) * scale, labels, **options)
        inputs = [model.weight, scale, OFFSET]
        gradients = torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)
        results[name] = [value.detach(), *gradients]
        if options:
            for tensor in results[name]:
                distributed.all_reduce(tensor)
                tensor /= distributed.get_world_size()
    return results


def ring_rank(rank, port, folder):
    """Save the losses of three processes around a ring."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3)
    here = slice(sum(RING_SIZES[:rank]), sum(RING_SIZES[: rank + 1]))
    x, y = (t[here] for t in batch())
    results = ring_results(x, y, LABELS[here], group=distributed.group.WORLD, ring=True)
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


# Losses that rank 1 calls with a temperature that is refused.
REFUSED = {
    "info_nce": gz.info_nce,
    "n_pair": gz.contrastive.n_pair,
    "clip_loss": gz.clip_loss,
    "nt_xent": gz.nt_xent,
    "supervised": lambda a, b, **o: gz.supervised_contrastive(a, torch.arange(len(a)) // 2, candidates=b,
                                                              candidate_labels=torch.arange(len(b)) // 2, **o),
    "siglip": gz.siglip,
}  # fmt: skip


# Calls that fail in one process, and have no value that is reduced.
ALONE = {
    "gather_candidates": lambda fails, a, _: gz.contrastive.gather_candidates(a[0] if fails else a),
    "Queue.put": lambda fails, a, _: gz.contrastive.Queue(3, 4).put(a[:, :3] if fails else a),
    "head, weight": lambda fails, a, g: gz.contrastive.linear_cross_entropy(
        a[:1], torch.ones(4 if fails else 5, 3 if fails else 4), torch.tensor([1]), group=g),
    "head, labels": lambda fails, a, g: gz.contrastive.linear_cross_entropy(
        a[:1], torch.ones(5, 4), torch.tensor([99 if fails else 1]), group=g),
}  # fmt: skip


def failing_rank(rank, port, folder):
    """Save the errors of three processes when the second one fails, and the loss that they compute after each."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    here = slice(sum(RING_SIZES[:rank]), sum(RING_SIZES[: rank + 1]))
    a, b = (t[here].requires_grad_() for t in batch())
    everyone, results = distributed.group.WORLD, {}

    def attempt(name, call):
        try:
            call()
            error = ""
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        after = [gz.info_nce(a, b, group=everyone, ring=ring).detach() for ring in (False, True)]
        for value in after:
            distributed.all_reduce(value)
        results[name] = error, [value / 3 for value in after]

    for ring in (False, True):
        for name, loss in REFUSED.items():
            options = {"temperature": -1.0 if rank == 1 else 0.3, "group": everyone, "ring": ring}
            attempt(f"{name} {ring}", lambda loss=loss, options=options: loss(a, b, **options))
        first = a[0] if rank == 1 else a
        attempt(f"shape {ring}", lambda first=first, ring=ring: gz.info_nce(
            first, b, group=everyone, ring=ring, reduction="sum"))  # fmt: skip
        # Lengths that differ from the number of vectors in one process, but not in the sum of all.
        wrong = (0, 1, -1)[rank]
        ids, weights = torch.arange(len(a) + wrong), torch.zeros(len(a) + wrong)
        options = {"anchor": a, "candidates": b, "group": everyone, "ring": ring}
        attempt(f"ids {ring}", lambda options=options, ids=ids: gz.info_nce(**options, ids=ids))
        attempt(f"log_weights {ring}", lambda options=options, w=weights: gz.info_nce(**options, log_weights=w))
    for name, call in ALONE.items():
        attempt(name, lambda call=call: call(rank == 1, a, everyone))
    attempt("ring_info_nce", lambda: gz.contrastive.ring_info_nce(a[0] if rank == 1 else a, b))
    # A block in the middle of a ring, forward and backward.
    for number in (2, 5):
        for reduction in ("mean", "sum"):
            attempt(f"block {number} {reduction}", lambda number=number, reduction=reduction: _with_a_failing_block(
                rank == 1, number, lambda: gz.info_nce(a, b, group=everyone, ring=True, reduction=reduction).backward()
            ))  # fmt: skip
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def _with_a_failing_block(fails, number, call):
    """Call while the sums over one block, counted from 1, run out of memory."""
    right, calls = ring_module.log_sum_exp, itertools.count(1)

    def wrong(*arguments, **options):
        if fails and next(calls) == number:
            raise torch.OutOfMemoryError("no memory for this block")
        return right(*arguments, **options)

    ring_module.log_sum_exp = wrong
    try:
        call()
    finally:
        ring_module.log_sum_exp = right


def grouped(x, y, labels, group):
    """Return the value and the gradient of each loss, averaged over processes as DistributedDataParallel does."""
    results = {}
    for name, loss in GROUPED.items():
        model = encoder()
        value = loss(model(x), model(y), labels, group)
        (gradient,) = torch.autograd.grad(value, model.weight)
        results[name] = [value.detach(), gradient]
        if group is not None:
            for tensor in results[name]:
                distributed.all_reduce(tensor)
                tensor /= 2
    return results


def contrastive_rank(rank, port, folder):
    """Save losses and gradients by `gather_candidates` and `ring_info_nce` on this process's part of the batch."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    here = slice(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    x, y = (t[here] for t in batch())
    results = {}
    for way in ("gather", "ring"):
        model = encoder()
        a, b = model(x), model(y)
        if way == "gather":
            all_of_them = gz.contrastive.gather_candidates(b)
            loss = gz.info_nce(a, all_of_them.candidates, positive=all_of_them.own, temperature=0.1, reduction="sum")
        else:
            loss = gz.contrastive.ring_info_nce(a, b, temperature=0.1, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, model.weight)
        distributed.all_reduce(gradient)
        results[way] = (loss.detach(), gradient)
    equal = slice(0, 3)  # equal sizes for DistributedDataParallel, which averages gradients
    model = encoder()
    wrapped = nn.parallel.DistributedDataParallel(model)
    both = wrapped(torch.cat([x[equal], y[equal]]))
    gz.contrastive.ring_info_nce(both[:3], both[3:], temperature=0.1, normalize=True).backward()
    results["averaged"] = model.weight.grad
    b = encoder()(y).detach().requires_grad_()
    second = gz.info_nce(
        x[:, :3], gz.contrastive.gather_candidates(b).candidates, positive=torch.zeros(len(x), dtype=torch.long)
    )
    (slope,) = torch.autograd.grad(second, b, create_graph=True)
    results["twice"] = torch.autograd.grad(slope.square().sum(), b)[0]
    results["queue"] = queue_after_two_steps(rank)
    results["grouped"] = grouped(x, y, LABELS[here], distributed.group.WORLD)
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.barrier()  # a process that leaves early takes the threads of the other down
    distributed.destroy_process_group()


def head_operands():
    """Hidden states, weights, bias, labels and options of a language-model head of seven words."""
    g = torch.Generator().manual_seed(4)
    hidden, weight, bias = (torch.randn(*n, generator=g, dtype=torch.float64) for n in ((5, 3), (7, 3), (7,)))
    labels = torch.tensor([6, 0, -100, 3, 4])
    options = {"softcap": 3.0, "label_smoothing": 0.1, "z_loss": 0.2}
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), labels, options


def head_rank(rank, port, folder):
    """Save the results of a head whose first four words are on the first process."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    hidden, weight, bias, labels, options = head_operands()
    words = slice(0, 4) if rank == 0 else slice(4, None)
    weight, bias = (t.detach()[words].requires_grad_() for t in (weight, bias))
    result = gz.contrastive.linear_cross_entropy(
        hidden, weight, labels, bias=bias, group=distributed.group.WORLD, **options
    )
    gradients = torch.autograd.grad(result.loss + result.entropy.square().sum(), (hidden, weight, bias))
    saved = {"result": [t.detach() for t in result], "gradients": gradients}
    torch.save(saved, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
