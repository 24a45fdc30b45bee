"""Training steps around a loss: batches larger than memory, and representations that may be truncated.

    cached_backward      gradients of a loss of all vectors, one part of the batch in memory at a time        [gao21]
    matryoshka_loss      sum of a loss over the first d coordinates, for several d                       [kusupati22]

Read next: losses/.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._errors import InputValueError
from .._typing import Float, Tensor


def cached_backward(
    loss: Callable[..., Tensor], encoders: Sequence[Callable[[Any], Tensor]], parts: Sequence[Sequence[Any]]
) -> Float[Tensor, ""]:
    """Add the gradients of loss(encoder(batch), ...) to the parameters, with the graph of one part at a time.   [gao21]

    Every part passes through its encoder twice: without a graph, for the vectors of the loss, and with one, to receive
    their gradients. Random numbers (dropout) are the same in both passes. Memory: the graph of one part, all vectors.

    Args:
        loss: function of one tensor of vectors for each encoder.
        encoders: functions of a part of a batch; the same function may appear twice.
        parts: the parts of the batch of each encoder.

    Returns:
        the loss, detached; the gradients of parameters of `loss` itself (a learned temperature) are added too.
    """
    if len(encoders) != len(parts) or not all(parts):
        fact = f"{len(encoders)} encoders and {[len(p) for p in parts]} parts"
        remedy = "Pass a list of at least one part for each encoder."
        raise InputValueError("cached_backward", "parts", f"parts must match the encoders, got {fact}", remedy)
    states, vectors = [], []
    with torch.no_grad():
        for encoder, batch in zip(encoders, parts, strict=True):
            outputs = []
            for part in batch:
                states.append(_random_state())
                outputs.append(encoder(part))
            vectors.append(outputs)
    leaves = [[output.detach().requires_grad_() for output in outputs] for outputs in vectors]
    value = loss(*(torch.cat(outputs) for outputs in leaves))
    value.backward()
    last, states_left = _random_state(), iter(states)
    for encoder, batch, outputs in zip(encoders, parts, leaves, strict=True):
        for part, leaf in zip(batch, outputs, strict=True):
            _restore(next(states_left))
            encoder(part).backward(leaf.grad)
    _restore(last)
    return value.detach()


def matryoshka_loss(
    loss: Callable[..., Tensor],
    *vectors: Float[Tensor, "m d"],
    dims: Sequence[int],
    weights: Sequence[float] | None = None,
) -> Tensor:
    """Weighted sum of loss(x[:, :d], ...) over dims, so that truncated vectors are trained too.   [kusupati22]

    Args:
        loss: function of the vectors, for example a lambda with temperature and normalize=True.
        vectors: all tensors that are truncated.
        dims: numbers of leading coordinates.
        weights: weight of each number; 1 by default.
    """
    call, most = "matryoshka_loss", min((t.shape[-1] for t in vectors), default=0)
    if not dims or not all(1 <= d <= most for d in dims):
        raise InputValueError(call, "dims", f"dims must be from 1 to {most}, got {[*dims]}", "Pass some of these.")
    shares = [1.0] * len(dims) if weights is None else [*weights]
    if len(shares) != len(dims):
        problem = f"weights must have one number for each of {len(dims)} dims, got {len(shares)}"
        raise InputValueError(call, "weights", problem, "Pass as many, or none.")
    losses = [w * loss(*(t[..., :d] for t in vectors)) for d, w in zip(dims, shares, strict=True)]
    return torch.stack(losses).sum(0)


def _random_state() -> tuple[Tensor, list[Tensor]]:
    return torch.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _restore(state: tuple[Tensor, list[Tensor]]) -> None:
    torch.set_rng_state(state[0])
    if state[1]:
        torch.cuda.set_rng_state_all(state[1])
