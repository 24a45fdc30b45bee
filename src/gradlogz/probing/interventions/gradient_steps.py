"""Updates of an attention sublayer with another component along the gradient of its log normaliser.

    G(x)  = sum_h (1/beta) log sum_j exp(beta <q_h(x), k_hj>)       x: residual stream, normed; keys fixed
    g     = grad G(x), its part that the norm does not undo (../inside/norm_sphere.py); ĝ = g / |g|
    removed      D - <D, ĝ> ĝ                                       D: the update
    step         D + eps |D| ĝ
    controls     the same vectors in other directions r of unit norm: D - <D, ĝ> r and D + eps |D| r

A norm before the layer or after the sum removes the components of g along x (and 1) to first order. Without them an
intervention changes what the model goes on with, and so does a control: r is made tangential in the same way. A random
direction is drawn from a hash of the token and does not depend on batches; the gradient of another token is that of
the token at half the position, which is an earlier one, so that no later token is revealed to a causal model.

Read next: ../predictions/ascent.py (the increase of G under the update), edited_passes.py (passes with new updates).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..corpus.batching import Batch
from ..inside.architecture import Sublayer
from ..inside.events import LayerCall
from ..inside.norm_sphere import norm_of_updates, tangential
from ..inside.reprojection import call_on
from ..statistics import hash_of, token_hashes

REMOVED, RANDOM, EARLIER = "gradient removed", "random direction", "earlier gradient"


class Directions(NamedTuple):
    """Unit vectors at every token: the tangential gradient, that of an earlier token, and random draws."""

    gradient: Float[Tensor, "b n D"]
    earlier: Float[Tensor, "b n D"]
    random: tuple[Float[Tensor, "b n D"], ...]


class EditedUpdate(NamedTuple):
    """An update: the name of the intervention, the name of the control (empty for the intervention itself)."""

    variant: str
    control: str
    update: Float[Tensor, "b n D"]


def gradient_of(layer_call: LayerCall, stream: Float[Tensor, "b n D"]) -> Float[Tensor, "b n D"] | None:
    """Return the gradient of G in the residual stream; None if the layer computes its own logits."""
    with torch.enable_grad():
        x = stream.detach().requires_grad_()
        call = call_on(layer_call, x if layer_call.norm is None else layer_call.norm(x))
        if call is None:
            return None
        fixed = call._replace(key=call.key.detach(), value=call.value.detach())
        G = fixed.attend("none").log_normalizer
        scale = fixed.options.get("scale") or fixed.query.shape[-1] ** -0.5
        (g,) = torch.autograd.grad(G.masked_fill(G == -torch.inf, 0.0).sum() / scale, x)
    return g


def directions_of(
    gradient: Float[Tensor, "b n D"],
    stream: Float[Tensor, "b n D"],
    sublayer: Sublayer,
    batch: Batch,
    *,
    draws: int,
    seed: int,
) -> Directions:
    """Return the tangential unit vectors of a layer for every token of a batch."""
    norm = norm_of_updates(sublayer)
    n = stream.shape[1]
    earlier = gradient[:, torch.arange(n, device=gradient.device) // 2]
    random = (_random(stream, batch, f"{seed} {sublayer.name} {draw}") for draw in range(draws))
    unit = [_unit(tangential(stream, v, norm)) for v in (gradient, earlier, *random)]
    return Directions(unit[0], unit[1], tuple(unit[2:]))


def edited_updates(
    update: Float[Tensor, "b n D"], directions: Directions, steps: tuple[float, ...]
) -> Iterator[EditedUpdate]:
    """Yield the update without its component along the gradient, with steps along it, and the controls of each."""
    component = (update * directions.gradient).sum(-1, keepdim=True)
    length = update.norm(dim=-1, keepdim=True)
    amounts = {REMOVED: -component} | {step_name(eps): eps * length for eps in steps}
    ways = [("", directions.gradient), (EARLIER, directions.earlier), *((RANDOM, r) for r in directions.random)]
    for variant, amount in amounts.items():
        for control, way in ways:
            yield EditedUpdate(variant, control, update + amount * way)


def step_name(eps: float) -> str:
    """Name of the intervention that adds eps times the norm of the update along the gradient."""
    return f"gradient step {eps:+g}"


def _unit(v: Float[Tensor, "b n D"]) -> Float[Tensor, "b n D"]:
    """Return v / |v|; 0 where v is 0."""
    return v / v.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(v.dtype).tiny)


def _random(like: Float[Tensor, "b n D"], batch: Batch, name: str) -> Float[Tensor, "b n D"]:
    """Return normal vectors that depend on the document, the position of the row in it and the name alone."""
    hashes = token_hashes(batch.keys.cpu() ^ hash_of(name), batch.starts.cpu().unsqueeze(-1)).squeeze(-1)
    n, width = like.shape[1:]
    rows = [torch.randn(n, width, generator=torch.Generator().manual_seed(h)) for h in hashes.tolist()]
    return torch.stack(rows).to(like)
