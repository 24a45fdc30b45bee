"""Architecture of a model: its residual branches, the sum that adds each of them, and their norms.

    y = x + u(N(x))      "pre": the norm `reads`            y = x + N(u(N(x)))      "sandwich": also the norm `closes`
    y = N(x + u(x))      "post": the norm `follows`         y = x + N(u(x))         "inner"

Read next: discovery.py (finds the architecture), capturing.py (records tensors at these sites).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from ..._typing import Float, Tensor


class SumSite(NamedTuple):
    """A sum in a forward pass: the innermost running module, the number of its call, and the number of the sum in it.

    Only sums of the width of the residual stream are counted.
    """

    module: str
    call: int
    sum: int


class Norm(NamedTuple):
    """A normalisation layer, gain * x / |x| + bias; with `centres` the mean over features is subtracted first."""

    name: str
    call: int
    centres: bool
    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]

    def beside(self, x: Tensor) -> tuple[Float[Tensor, " d"], Float[Tensor, " d"]]:
        """Gain and bias in the dtype of a tensor and on its device, for which the host does not wait."""
        return self.gain.to(x, non_blocking=True), self.bias.to(x, non_blocking=True)


class OutputColumns(NamedTuple):
    """Some of the outputs of a module: all, or those of one of two matrices that are fused."""

    module: str
    start: int
    stop: int


class FeedForward(NamedTuple):
    """A feed-forward map by its modules: f(first) second, or f(gate) * first second; f: name of the activation."""

    first: OutputColumns
    gate: OutputColumns | None
    second: str
    activation: str


class Sublayer(NamedTuple):
    """One residual branch of a model.

    name: name of the attention layer, or of the smallest module that contains the matrices of a feed-forward map;
        numbered from the second call on, as in `observe`.
    reads: norm before the branch; closes: norm of its update; follows: norm after the sum.
    sum, stream: site of the sum, and the index of the operand that is the residual stream.
    update: site and operand index of the update: an operand of `sum`, or of an earlier sum if branches are parallel.
    norm_of_stream: in a post-norm model, the norm whose output is the residual stream.
    """

    name: str
    kind: Literal["attention", "feed_forward"]
    reads: Norm | None
    closes: Norm | None
    follows: Norm | None
    sum: SumSite
    stream: int
    update: tuple[SumSite, int]
    norm_of_stream: Norm | None

    @property
    def placement(self) -> str:
        """Placement of the norms: "pre", "post", "sandwich", "inner" or "none"."""
        if self.closes is not None:
            return "sandwich" if self.reads is not None else "inner"
        return "pre" if self.reads is not None else "post" if self.follows is not None else "none"


class Architecture(NamedTuple):
    """The sublayers of a model in the order of computation, and the width of its residual stream.

    attention: names of the attention layers in the order of computation, including those without a recognised branch.
    outputs: for each layer, the output projection: the module that maps the concatenated heads to the stream.
    parted: layers that can be run on a subset of their tokens.
    feed_forward: for each feed-forward sublayer whose form is recognised, its modules.
    unembedding: the module that maps the last vectors to logits of words, and the norm whose output it reads, if any.
    """

    sublayers: tuple[Sublayer, ...]
    width: int
    attention: tuple[str, ...]
    outputs: dict[str, str]
    parted: frozenset[str]
    feed_forward: Mapping[str, FeedForward] = MappingProxyType({})
    unembedding: tuple[str, Norm | None] | None = None

    def branch_of(self, layer: str) -> Sublayer | None:
        """Return the residual branch of an attention layer, None if it has none."""
        return next((s for s in self.sublayers if s.kind == "attention" and s.name == layer), None)
