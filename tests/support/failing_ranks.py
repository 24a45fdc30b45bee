"""Calls of three processes of which one fails or differs, and the error that each process reports."""

import contextlib
import datetime
import os

import torch
from torch import distributed

import gradlogz as gz
from gradlogz.attention import ring as attention_ring
from gradlogz.attention import ring_attend
from gradlogz.contrastive import Queue, gather_candidates, ring, ring_info_nce

PROCESSES, FAILING = 3, 1
TIMEOUT = datetime.timedelta(seconds=60)  # of the group: far above the time of all calls


def vectors(rank):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def attended(q, **options):
    return ring_attend(q[None, None], q[None, None], q[None, None], **options).output.sum()


# Calls on all processes; `bad` is True in the failing one.
REFUSED = {
    "temperature": lambda a, bad, **o: gz.info_nce(a, a, temperature=-1.0 if bad else 1.0, **o),
    "not a tensor": lambda a, bad, **o: gz.contrastive.n_pair(a.tolist() if bad else a, a, **o),
    "positive": lambda a, bad, **o: gz.info_nce(a, a, positive=torch.full((4,), 9 if bad else 0), **o),
    "hard negatives": lambda a, bad, **o: gz.info_nce(a, a, hard_negatives=torch.ones(4, 2, 2 if bad else 3), **o),
    "reduction": lambda a, bad, **o: gz.clip_loss(a, a, reduction="median" if bad else "mean", **o),
    "rows": lambda a, bad, **o: gz.nt_xent(a, a[1:] if bad else a, **o),
    "labels": lambda a, bad, **o: gz.supervised_contrastive(a, torch.zeros(3 if bad else 4).long(), **o),
    "sizes": lambda a, bad, **o: gz.siglip(a, a[1:] if bad else a, **o),
}
DIFFERENT = {
    "dimension": lambda a, bad, **o: gz.info_nce(*(2 * [a[:, :2] if bad else a]), **o),
    "dtype": lambda a, bad, **o: gz.clip_loss(*(2 * [a.double() if bad else a]), **o),
    "ids": lambda a, bad, **o: gz.info_nce(a, a, ids=None if bad else torch.arange(4), **o),
    "log weights": lambda a, bad, **o: gz.info_nce(a, a, log_weights=None if bad else torch.zeros(4), **o),
}
OTHER_CALLS = {
    "ring_info_nce": lambda a, bad: ring_info_nce(a, a, temperature=0.0 if bad else 1.0),
    "gather_candidates": lambda a, bad: gather_candidates(a.long() if bad else a),
    "Queue.put": lambda a, bad: Queue(8, 3).put(a[0] if bad else a),
    "ring_attend": lambda a, bad: attended(a, dropout_p=0.5 if bad else 0.0),
    "scale": lambda a, bad: attended(a, scale="wide" if bad else None),
}
UNEQUAL = {
    "dtype": lambda a, bad: attended(a.double() if bad else a),
    "heads": lambda a, bad: ring_attend(*(3 * [a.expand(2 if bad else 1, 1, 4, 3)])),
    "band": lambda a, bad: attended(a, is_causal=bad),
}


@contextlib.contextmanager
def broken(module, name, bad, calls):
    """A function of a module that fails from a number of calls on, in the failing process."""
    function, count = getattr(module, name), iter(range(1000))

    def replacement(*arguments, **options):
        if bad and next(count) >= calls:
            raise MemoryError("no memory left")
        return function(*arguments, **options)

    setattr(module, name, replacement)
    try:
        yield
    finally:
        setattr(module, name, function)


def reported(call):
    """Type and message of the error of a call, or None."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def in_the_middle(rank, bad, calls, backward):
    """Errors of the losses and of attention whose computation of a block fails, forward or in the backward pass."""
    a = vectors(rank).requires_grad_()
    group = distributed.group.WORLD
    cases = {
        "info_nce": (ring, "log_sum_exp", lambda: gz.info_nce(a, a.flip(0), group=group, ring=True)),
        "ring_attend": (attention_ring, "_attend", lambda: attended(a)),
    }
    results = {}
    for name, (module, function, call) in cases.items():
        if not backward:
            with broken(module, function, bad, calls):
                results[name] = reported(call)
            continue
        value = call()
        with broken(module, function, bad, calls):
            results[name] = reported(value.backward)
    return results


def failing_rank(rank, port, folder):
    """Save the errors of all cases, and a loss after them."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=PROCESSES, timeout=TIMEOUT)
    a, bad, group, results = vectors(rank), rank == FAILING, distributed.group.WORLD, {}
    for ways, ring_or_gather in (("gather", {"group": group}), ("ring", {"group": group, "ring": True})):
        for name, call in (REFUSED | DIFFERENT).items():
            results[ways, name] = reported(lambda c=call, o=ring_or_gather: c(a, bad, **o))
    for name, call in OTHER_CALLS.items():
        results["other", name] = reported(lambda c=call: c(a, bad))
    for name, call in UNEQUAL.items():
        results["unequal", name] = reported(lambda c=call: c(a, bad))
    for calls in range(PROCESSES):  # the first, the middle and the last block
        for backward in (False, True):
            results["middle", calls, backward] = in_the_middle(rank, bad, calls, backward)
    results["after"] = gz.info_nce(a, a, group=group, ring=True), gz.info_nce(a, a, group=group)
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def rank_that_ends(rank, port, folder):
    """End one process in the middle of a ring; the others save their error."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=PROCESSES, timeout=TIMEOUT)
    a = vectors(rank)

    def end(*_, **__):
        os._exit(0)  # as if killed: no error is announced

    if rank == FAILING:
        ring.log_sum_exp = end
    error = reported(lambda: gz.info_nce(a, a, group=distributed.group.WORLD, ring=True))
    torch.save(error, f"{folder}/{rank}.pt")
    os._exit(0)
