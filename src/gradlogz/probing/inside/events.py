"""Events of a forward pass, as records.

    Attended        one call of attention: its arguments and the statistics of `attend`
    Passed          one residual branch: stream + update
    Normed          one norm of the residual stream
    ForwardOutput   the end of the pass, with the model's output

Read next: following.py (makes the events), architecture.py (the branches and norms they refer to).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ..._errors import InputValueError
from ..._typing import Bool, Float, Int, Tensor
from ...attention.in_models.hidden_keys import visible_by_logits, visible_by_masks
from ...attention.result import Attention
from .architecture import Norm, Sublayer
from .feed_forward import FeedForwardMap


class AttentionArguments(NamedTuple):
    """The arguments of one call of attention, named as in `attend`; the scale is always a number."""

    query: Float[Tensor, "*b h m d"]
    key: Float[Tensor, "*b hk n d"]
    value: Float[Tensor, "*b hk n v"]
    scale: float
    attn_mask: Tensor | None = None
    bias: Tensor | None = None
    segments: Tensor | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    is_causal: bool = False
    window: tuple[int | None, int | None] | None = None
    dropout_p: float = 0.0
    enable_gqa: bool = False


class LayerCall(NamedTuple):
    """A layer and the arguments of one call, with which it can be run again on other tokens (reprojection.py).

    tokens: the argument from which queries are computed; source: that of keys and values, None if it is the same.
    norm: norm between the residual stream and the layer.
    parted: whether the layer can be run on a subset of its tokens; places: positions of the subset, if it cannot.
    output: map from the concatenated outputs of the heads to the update; None if it is unknown.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    tokens: Float[Tensor, "b m d"]
    source: Float[Tensor, "b n e"] | None
    norm: nn.Module | None = None
    parted: bool = False
    places: Int[Tensor, "b r"] | None = None
    output: nn.Module | None = None


class Attended(NamedTuple):
    """One call of attention: its arguments, and the statistics of `attend`.

    call: the arguments, or the logits [b, h, m, n] if the layer computes its own softmax.
    crosses: whether this is cross-attention: keys and queries come from different tokens.
    layer_call: the call of the layer; None if its input tokens are not among its arguments.
    output_projection: module that maps the concatenated outputs of the heads to the residual stream, None if unknown.
    """

    layer: str
    sublayer: Sublayer | None
    call: AttentionArguments | Float[Tensor, "b h m n"]
    attention: Attention
    crosses: bool
    layer_call: LayerCall | None = None
    output_projection: nn.Module | None = None

    @property
    def arguments(self) -> AttentionArguments:
        """Queries, keys, values, masks, scale, sinks and soft cap of the call; an error if only logits are known."""
        if not isinstance(self.call, AttentionArguments):
            problem = f"{self.layer} computes its own logits; its queries, keys and values are unknown"
            raise InputValueError("Attended", "arguments", problem, "Use `call`, which contains the logits.")
        return self.call

    @property
    def query(self) -> Float[Tensor, "b h m d"]:
        """Queries, after rotary embeddings and before scaling."""
        return self.arguments.query

    @property
    def key(self) -> Float[Tensor, "b hk n d"]:
        """Keys, once for each group of heads that share them."""
        return self.arguments.key

    @property
    def value(self) -> Float[Tensor, "b hk n v"]:
        """Values, once for each group of heads that share them."""
        return self.arguments.value

    def visible_keys(self) -> Bool[Tensor, "b n"] | None:
        """Return which keys are visible to some query of their sequence; None if no mask hides any."""
        if isinstance(self.call, AttentionArguments):
            visible = visible_by_masks((self.call.attn_mask, self.call.bias), self.call.query, self.call.key)
            return None if visible is None else visible.any(-2)
        return visible_by_logits(self.call).any(-2)


class Passed(NamedTuple):
    """A residual branch: stream + update, where update = map(input).

    input: input of the map: the output of the norm before it, or the stream itself.
    after: the sum; for parallel branches, the sum with both updates.
    map: modules of a feed-forward map, None for attention and for maps of another form.
    """

    sublayer: Sublayer
    stream: Float[Tensor, "b n d"]
    input: Float[Tensor, "b n d"]
    update: Float[Tensor, "b n d"]
    after: Float[Tensor, "b n d"]
    map: FeedForwardMap | None = None


class Normed(NamedTuple):
    """A norm of the residual stream: its input and its output."""

    norm: Norm
    input: Float[Tensor, "b n d"]
    result: Float[Tensor, "b n d"]


class ForwardOutput(NamedTuple):
    """End of a pass: the model's output, with logits [b, n, vocabulary] if it has a language-model head."""

    output: Any
    inputs: dict[str, Tensor]


Event = Attended | Passed | Normed
