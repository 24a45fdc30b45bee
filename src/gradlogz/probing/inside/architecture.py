"""How a model is built: its residual branches, where each is summed, and the norms about it.

    y = x + u(N(x))      "pre": the norm `reads`            y = x + N(u(N(x)))      "sandwich": another one `closes`
    y = N(x + u(x))      "post": the norm `follows`         y = x + N(u(x))         "inner"

Read next: discovery.py (how it is found), capturing.py (what is looked at there).
"""

from typing import Literal, NamedTuple

from ..._typing import Float, Tensor


class SumSite(NamedTuple):
    """A sum inside a pass: the innermost module that runs, which call of it, and which of its sums of that width."""

    module: str
    call: int
    sum: int


class Norm(NamedTuple):
    """A normalisation of tokens, gain * x / |x| + bias, the mean of the features taken off first if it `centres`."""

    name: str
    call: int
    centres: bool
    gain: Float[Tensor, " d"]
    bias: Float[Tensor, " d"]


class Sublayer(NamedTuple):
    """One residual branch of a model.

    name: of the attention layer, or of the smallest module that holds the matrices of a feed-forward map; numbered from
        the second call on, as in `observe`.
    reads: the norm before it; closes: the norm of its update; follows: the norm after the sum.
    sum, stream: where the sum is made, and which operand is the stream.
    update: where the update is found: an operand of that sum, or of one before it where branches are parallel.
    norm_of_stream: of a post-norm model, the norm whose output the stream is.
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
        """Where the norms are: "pre", "post", "sandwich", "inner" or "none"."""
        if self.closes is not None:
            return "sandwich" if self.reads is not None else "inner"
        return "pre" if self.reads is not None else "post" if self.follows is not None else "none"


class Architecture(NamedTuple):
    """The sublayers of a model in the order of computation, and the width of its stream.

    attention: the layers of attention in the order of computation, whether or not their branch was recognised.
    outputs: of each layer the module that takes the heads' outputs side by side and returns vectors of the stream.
    parted: the layers that can be asked about some of their tokens alone.
    """

    sublayers: tuple[Sublayer, ...]
    width: int
    attention: tuple[str, ...]
    outputs: dict[str, str]
    parted: frozenset[str]

    def of(self, layer: str) -> Sublayer | None:
        """The branch of an attention layer; None if it is not one of a residual stream."""
        return next((s for s in self.sublayers if s.kind == "attention" and s.name == layer), None)
