"""What happens inside a model in one pass, as records.

    Attended        one call of attention: its arguments and the statistics of `attend`
    Passed          one residual branch: stream + update
    Normed          one norm of the stream
    ForwardOutput   the pass has ended

Read next: following.py (who makes them), architecture.py (the branches and norms they name).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ..._errors import InputValueError
from ..._typing import Bool, Float, Int, Tensor
from ...attention.in_models.hidden_keys import visible_by_logits, visible_by_masks
from ...attention.result import Attention
from .architecture import Norm, Sublayer


class AttentionArguments(NamedTuple):
    """The arguments of one call of attention, in the words of `attend`; the scale is always a number."""

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
    """A layer and the arguments of one call of it, with which it can be run again on other tokens (reprojection.py).

    given: the tokens that queries are made of, among them; source: those of keys and values, None if they are the same.
    norm: what the stream passes before the layer reads it.
    parted: whether the layer can be run on some tokens alone; places: where they are among all, if it cannot.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Float[Tensor, "b m d"]
    source: Float[Tensor, "b n e"] | None
    norm: nn.Module | None = None
    parted: bool = False
    places: Int[Tensor, "b r"] | None = None


class Attended(NamedTuple):
    """One call of attention: its arguments, and the statistics of `attend`.

    call: the arguments; the logits [b, h, m, n] alone where a layer writes out its own softmax.
    crosses: whether the keys are of other tokens than the queries.
    layer_call: the layer with its arguments; None if what it reads is not among them.
    """

    layer: str
    sublayer: Sublayer | None
    call: AttentionArguments | Float[Tensor, "b h m n"]
    attention: Attention
    crosses: bool
    layer_call: LayerCall | None = None

    @property
    def arguments(self) -> AttentionArguments:
        """Queries, keys, values, masks, scale, sinks and soft cap of the call."""
        if not isinstance(self.call, AttentionArguments):
            condition = f"{self.layer} must hand its queries to a function"
            fact = "a layer that computes its own logits"
            raise InputValueError(
                "Attended", self.layer, f"{condition}, got {fact}", "Take call, which holds the logits."
            )
        return self.call

    @property
    def query(self) -> Float[Tensor, "b h m d"]:
        """The queries as they meet the keys: with rotations, before the scale."""
        return self.arguments.query

    @property
    def key(self) -> Float[Tensor, "b hk n d"]:
        """The keys, of each group of heads once."""
        return self.arguments.key

    @property
    def value(self) -> Float[Tensor, "b hk n v"]:
        """The values, of each group of heads once."""
        return self.arguments.value

    def visible_keys(self) -> Bool[Tensor, "b n"] | None:
        """Keys that some query of their sequence may see; None if no mask says so."""
        if isinstance(self.call, AttentionArguments):
            return visible_by_masks((self.call.attn_mask, self.call.bias), self.call.query, self.call.key)
        return visible_by_logits(self.call)


class Passed(NamedTuple):
    """A sublayer: stream + update, where update = map(given).

    given: what the map reads: the stream through the norm before it, or the stream.
    after: the sum; of parallel branches, with both.
    """

    sublayer: Sublayer
    stream: Float[Tensor, "b n d"]
    given: Float[Tensor, "b n d"]
    update: Float[Tensor, "b n d"]
    after: Float[Tensor, "b n d"]


class Normed(NamedTuple):
    """A norm of the stream: its input and its output."""

    norm: Norm
    given: Float[Tensor, "b n d"]
    result: Float[Tensor, "b n d"]


class ForwardOutput(NamedTuple):
    """A batch has passed the model: what it returned, [b, n, vocabulary] logits where it has a head for words."""

    output: Any
    inputs: dict[str, Tensor]


Event = Attended | Passed | Normed
