"""The sphere to which a norm projects tokens, and the parts of a step that it keeps.

    P x           token without its mean if the norm centres
    tangential    D - mean - <D, n> n,    n = P x / |P x|           part of a step that this norm does not undo
    on_sphere     |P x| P(x + D) / |P(x + D)| + mean of x           the norm without gain and bias; leaves x where it is

Read next: ../predictions/observables/moved_tokens.py and ../interventions/gradient_steps.py, which move tokens.
"""

import torch

from ..._typing import Float, Tensor
from .architecture import Norm, Sublayer


def norm_of_updates(sublayer: Sublayer) -> Norm | None:
    """The norm that reads the updated residual stream: before the next branch of its kind, or after the sum."""
    return sublayer.reads or sublayer.follows


def tangential(x: Float[Tensor, "... D"], step: Float[Tensor, "... D"], norm: Norm | None) -> Float[Tensor, "... D"]:
    """Part of a step from x that a norm does not undo; all of it without a norm."""
    if norm is None:
        return step
    n, step = centred(x, norm), centred(step, norm)
    n = n / n.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(n.dtype).tiny)
    for _ in range(2):  # twice, because rounding leaves a part of a large component
        step = step - (step * n).sum(-1, keepdim=True) * n
    return step


def tangential_to_both(
    x: Float[Tensor, "... D"], other: Float[Tensor, "... D"], step: Float[Tensor, "... D"], norm: Norm | None
) -> Float[Tensor, "... D"]:
    """Part of a difference of steps from two tokens that a norm undoes at neither of them; all of it without a norm."""
    if norm is None:
        return step
    return tangential(x, tangential(tangential(x, other, norm), step, norm), norm)


def on_sphere(x: Float[Tensor, "... D"], step: Float[Tensor, "... D"], norm: Norm | None) -> Float[Tensor, "... D"]:
    """Tokens x after a step, projected back to the sphere of a norm without its gain and bias."""
    if norm is None:
        return x + step
    still, moved = centred(x, norm), centred(x + step, norm)
    length = moved.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(moved.dtype).tiny)
    return moved * (still.norm(dim=-1, keepdim=True) / length) + (x - still)


def centred(x: Float[Tensor, "..."], norm: Norm | None) -> Float[Tensor, "..."]:
    """Tokens without their mean over features if the norm subtracts it."""
    return x - x.mean(-1, keepdim=True) if norm is not None and norm.centres else x
