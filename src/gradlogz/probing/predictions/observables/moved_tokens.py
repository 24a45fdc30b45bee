"""Sampled tokens of attention layers, moved in the residual stream: their log normalisers and updates, keys fixed.

Steps are taken along the sphere of the norm that reads the updated stream (../../inside/norm_sphere.py).

Layers run again only after the pass, because their modules are observed during it.

Read next: ../ascent.py and ../expansion.py, which move tokens along updates and along random directions.
"""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from ...._typing import Bool, Float, Int, Tensor
from ....attention.functional import attend
from ....attention.in_models.intercepted_calls import WIDTH
from ....attention.result import Attention
from ...batch_pass import BatchPass
from ...inside.architecture import Norm
from ...inside.events import Attended, AttentionArguments, Event, ForwardOutput, LayerCall, Passed
from ...inside.norm_sphere import centred, norm_of_updates, on_sphere, tangential
from ...inside.reprojection import at_tokens, call_on, queries_of
from .attention_rows import applies, at, chosen, log_weights_of

PART = 16  # one token in PART is sampled
LEAST = 0.05  # bound on the cosine of updates and gradients, and on the share of a step of equal norm
INTERESTING = 2 * LEAST  # smallest effect that is called interesting
DERIVATION = (  # of the bound, for the claims that share it
    f"Half of {INTERESTING:g}, the smallest effect called interesting. The test against a bound b finds an effect of "
    "2 b with a probability of 80 % if b is at least 2.8 standard errors (1.96 + 0.84) and the band of the null ends "
    "below b. The band is the wider limit in small models: under random rotations a cosine has a standard deviation "
    "that decreases with the width."
)
DRAWS = 20  # random rotations of the updates
LARGE, TIMES = 100.0, 1000.0  # a massive activation, relative to the median of its token


class Site(NamedTuple):
    """An attention layer at the sampled tokens, with the residual stream, the update and the update of other tokens.

    attn_mask: bias and mask of the sampled tokens. norm: the norm that reads the updated stream, None if there is none.
    heads, other_heads: outputs of the heads for the token and for the other token.
    """

    layer_call: LayerCall
    places: Int[Tensor, "b r"]
    valid: Bool[Tensor, "b r"]
    call: AttentionArguments
    attn_mask: Tensor | None
    key_mean: Float[Tensor, "b h r d"] | None
    norm: Norm | None
    stream: Float[Tensor, "b r D"]
    update: Float[Tensor, "b r D"]
    other: Float[Tensor, "b r D"]
    heads: Float[Tensor, "b h r v"]
    other_heads: Float[Tensor, "b h r v"]

    @property
    def ordinary(self) -> Bool[Tensor, "b r"]:
        """Sampled tokens that are not the first of their sequence and have no massive activation."""
        return self.valid & (self.places > 0) & ~massive(self.stream)

    def tangential(self, step: Float[Tensor, "*k b r D"]) -> Float[Tensor, "*k b r D"]:
        """Part of a step that the norm does not undo; all of it without a norm."""
        return tangential(self.stream, step, self.norm)

    def on_sphere(self, step: Float[Tensor, "*k b r D"]) -> Float[Tensor, "*k b r D"]:
        """Tokens after a step, projected back to the sphere of the norm."""
        return on_sphere(self.stream, step, self.norm)

    def centred(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """Tokens without their mean over features if the norm subtracts it."""
        return centred(x, self.norm)

    def queries(self, streams: Float[Tensor, "k b r D"]) -> Float[Tensor, "b h kr d"] | None:
        """Queries of k versions of the tokens; None if the layer computes its own logits."""
        return queries_of(self.layer_call, streams)

    def origin(self) -> Float[Tensor, "#b h 1 d"]:
        """Key of a zero token: the biases of the layer and of its norm; 0 if it depends on the position.

        A vector that is added to all keys, such as a bias, changes all logits of a row by the same number, and no
        attention weight: the origin of the keys is no property of the model.
        """
        h, zero = self.call.query.shape[1], torch.zeros_like(self.layer_call.tokens)
        at_zero = call_on(self.layer_call, zero if self.layer_call.norm is None else self.layer_call.norm(zero))
        if at_zero is None:
            return self.call.key.new_zeros(1, h, 1, self.call.key.shape[-1])
        key = at_zero.key[:, :, :1].repeat_interleave(h // at_zero.key.shape[1], 1)
        return torch.where((at_zero.key == at_zero.key[:, :, :1]).all(), key, 0.0)

    def log_normalizers(
        self, query: Float[Tensor, "b h kr d"], origin: Float[Tensor, "#b h 1 d"]
    ) -> Float[Tensor, "k b r"]:
        """sum_h (G_h / beta - <query, origin>) of every version of the tokens: keys are relative to an origin."""
        # Only the log normaliser is needed: the narrowest values will do.
        G = self._attend(query, self.call.key[..., :WIDTH]).log_normalizer
        G = G.masked_fill(G == -torch.inf, 0.0) / self.call.scale
        return self._versions((G - (query * origin).sum(-1)).sum(1))

    def heads_of(self, query: Float[Tensor, "b h kr d"]) -> Float[Tensor, "k b h r v"]:
        """Outputs of the heads for every version of the tokens."""
        return self._versions(self._attend(query, self.call.value).output.transpose(1, 2)).transpose(2, 3)

    def updates(self, heads: Float[Tensor, "k b h r v"]) -> Float[Tensor, "k b r D"] | None:
        """Updates by these outputs of the heads; None if the output projection of the layer is unknown."""
        if self.layer_call.output is None:
            return None
        concatenated = heads.transpose(2, 3).flatten(3).flatten(0, 1).to(self.call.value.dtype)
        updates: Tensor = self.layer_call.output(concatenated.contiguous())  # layers of tokens [b, n, D], as in a pass
        return updates.unflatten(0, heads.shape[:2])

    def read_by_heads(self, y: Float[Tensor, "k b r D"]) -> Float[Tensor, "k b h r v"] | None:
        """y W_oᵀ, the inner products of y with the output vectors of each head; None if these are unknown."""
        with torch.enable_grad():
            heads = self.heads.expand(len(y), *self.heads.shape).detach().requires_grad_()
            u = self.updates(heads)
            if u is None:
                return None
            (read,) = torch.autograd.grad(u, heads, y.to(u.dtype))
        return read

    def _attend(self, query: Tensor, value: Tensor) -> Attention:
        versions = query.shape[2] // self.places.shape[1]
        call = self.call
        return attend(
            query, call.key, value,
            attn_mask=None if self.attn_mask is None else self.attn_mask.repeat(1, 1, versions, 1), scale=call.scale,
            softcap=call.softcap, sinks=call.sinks, enable_gqa=call.enable_gqa, statistics="none",
        )  # fmt: skip

    def _versions(self, t: Float[Tensor, "b kr ..."]) -> Float[Tensor, "k b r ..."]:
        return t.unflatten(1, (-1, self.places.shape[1])).transpose(0, 1)


@dataclass
class _Memory:
    attended: dict[str, tuple[Attended, LayerCall]] = field(default_factory=dict)
    sites: dict[str, Site] = field(default_factory=dict)


def sites_of(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, Site]:
    """Sampled tokens of every self-attention layer, at the end of the pass; nothing before."""
    return batch_pass.once(event, "sites", lambda: _sites(event, batch_pass))


def scaled(step: Float[Tensor, "... D"], length: Float[Tensor, "... 1"]) -> Float[Tensor, "... D"]:
    """Steps of these lengths in the same directions; 0 stays 0."""
    return step / step.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(step.dtype).tiny) * length


def massive(x: Float[Tensor, "... D"]) -> Bool[Tensor, "..."]:
    """True for tokens with a massive activation."""
    size = x.abs()
    largest, median = size.amax(-1), size.median(-1).values
    return (largest > LARGE) & (largest >= TIMES * median)


def rotated(t: Float[Tensor, "... D"]) -> Float[Tensor, "... r D"]:
    """Vectors under the random rotations: signs and order of the coordinates drawn, the same in every layer."""
    order, signs = _rotations(t.shape[-1], t.device)
    return t[..., order] * signs.to(t.dtype)


@lru_cache
def _rotations(width: int, device: torch.device) -> tuple[Int[Tensor, "r D"], Float[Tensor, "r D"]]:
    generator = torch.Generator().manual_seed(width)
    order = torch.stack([torch.randperm(width, generator=generator) for _ in range(DRAWS)])
    signs = 2.0 * torch.randint(0, 2, (DRAWS, width), generator=generator) - 1
    return order.to(device), signs.to(device)


def _sites(event: Event | ForwardOutput, batch_pass: BatchPass) -> dict[str, Site]:
    memory = batch_pass.memory(_Memory)
    if isinstance(event, Attended):
        if event.layer_call is not None and applies(event, batch_pass) and not event.crosses:
            memory.attended[event.layer] = event, event.layer_call
    elif isinstance(event, Passed) and event.sublayer.name in memory.attended:
        attended, layer_call = memory.attended.pop(event.sublayer.name)
        known = batch_pass.real(attended)
        if event.stream.shape[:2] == known.shape:
            memory.sites[event.sublayer.name] = _site(attended, layer_call, event, batch_pass, known)
    return memory.sites if isinstance(event, ForwardOutput) else {}


def _site(
    attended: Attended, layer_call: LayerCall, passed: Passed, batch_pass: BatchPass, known: Bool[Tensor, "b n"]
) -> Site:
    call, mean = attended.arguments, attended.attention.key_mean
    places, valid = chosen(attended, batch_pass, 1 / PART)
    empty = call.query.new_zeros(*call.query.shape[:2], 0, call.query.shape[3])  # queries are computed again
    elsewhere = other_places(places, known)
    x, D, other = (
        at(t.unsqueeze(1), index).squeeze(1)
        for t, index in ((passed.stream, places), (passed.update, places), (passed.update, elsewhere))
    )
    heads, other_heads = (at(attended.attention.output, index) for index in (places, elsewhere))
    return Site(
        at_tokens(layer_call, places), places, valid, call._replace(query=empty),
        log_weights_of(attended, places), None if call.softcap is not None or mean is None else at(mean, places),
        norm_of_updates(passed.sublayer), x, D, other, heads, other_heads,
    )  # fmt: skip


def other_places(places: Int[Tensor, "b r"], known: Bool[Tensor, "b n"]) -> Int[Tensor, "b r"]:
    """Position of another token of the same row for each token, half a row away."""
    n = known.sum(1, keepdim=True).clamp(min=1)
    first = known.int().argmax(1, keepdim=True)  # rows may be padded on the left
    return (first + (places - first + (n // 2).clamp(min=1)) % n).clamp(max=known.shape[1] - 1)
