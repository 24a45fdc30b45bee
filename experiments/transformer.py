"""One small transformer whose parts are arguments.

    pre     x + f(N(x))            the stream is contracted once more before the unembedding
    post    N(x + f(x))            the embedding is contracted, too
    peri    x + N(f(N(x)))         likewise

Each block is attention and then feed-forward, each in the placement above. Embedding and unembedding share a matrix
unless they are separate.

Read next: parts.py (the layers), costs.py (equal parameters and equal compute), training.py.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from gradlogz._errors import InputValueError

from .parts import (
    Activation,
    AttentionKind,
    AttentionPart,
    ContractionKind,
    FeedForwardKind,
    contraction,
    feed_forward,
    fix_maps,
)

Placement = Literal["pre", "post", "peri"]
Objective = Literal["causal", "masked"]


@dataclass(frozen=True)
class ModelSettings:
    """Everything that determines a model, but its seed.

    Attributes:
        vocabulary: number of tokens.
        context: largest number of positions, each with a learned vector.
        hidden: units of a feed-forward layer.
        activation: of free feed-forward layers.
        shared: one block, applied `layers` times.
        separate: an unembedding of its own, instead of the transposed embedding.
        identity, frozen: letters of "qkvo": maps of softmax attention that are the identity, or stay as they were
            drawn; both need a training without weight decay.
        numbers: tokens are vectors of `vocabulary` numbers; embedding and unembedding are linear maps of their own.
        embedding_scale: factor of the sum of embedding and positions, each of which begins with standard deviation
            0.02; the unembedding is without it.
    """

    vocabulary: int
    context: int
    width: int = 64
    heads: int = 4
    layers: int = 2
    hidden: int = 256
    attention: AttentionKind = "softmax"
    contraction: ContractionKind = "layer_norm"
    placement: Placement = "pre"
    feed_forward: FeedForwardKind = "free"
    activation: Activation = "gelu"
    objective: Objective = "causal"
    shared: bool = False
    separate: bool = False
    numbers: bool = False
    embedding_scale: float = 1.0
    identity: str = ""
    frozen: str = ""

    def __post_init__(self) -> None:
        for name, kinds in (("placement", Placement), ("objective", Objective), ("activation", Activation)):
            if getattr(self, name) not in get_args(kinds):
                problem = f"{name} {getattr(self, name)!r} is not a known name"
                raise InputValueError("ModelSettings", name, problem, f"Choose one of {', '.join(get_args(kinds))}.")

    def as_dict(self) -> dict[str, Any]:
        """Settings as plain values."""
        return asdict(self)


class Block(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, settings: ModelSettings) -> None:
        super().__init__()
        s = settings  # Shorthand
        self.placement = s.placement
        self.attention = AttentionPart(s.attention, s.width, s.heads)
        self.feed_forward = feed_forward(s.feed_forward, s.width, s.hidden, s.activation)
        sublayers = 1 if self.feed_forward is None else 2
        places = {"pre": ("before",), "post": ("after",), "peri": ("before", "after")}[s.placement]
        self.before = nn.ModuleList(
            contraction(s.contraction, s.width) if "before" in places else nn.Identity() for _ in range(sublayers)
        )
        self.after = nn.ModuleList(
            contraction(s.contraction, s.width) if "after" in places else nn.Identity() for _ in range(sublayers)
        )

    def forward(self, x: Tensor, variance: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor | None]:
        """Tokens [b, n, d] after the block, and their variance (moment attention only)."""
        update, variance = self.attention(self.before[0](x), variance, is_causal)
        x = self._joined(0, x, update)
        if self.feed_forward is not None:
            x = self._joined(1, x, self.feed_forward(self.before[1](x)))
        return x, variance

    def _joined(self, sublayer: int, x: Tensor, update: Tensor) -> Tensor:
        if self.placement == "post":
            return self.after[sublayer](x + update)
        return x + self.after[sublayer](update)


class Model(nn.Module):
    """A module with settings, which the training loop writes into the run folder by `settings.as_dict()`."""

    settings: Any


class State(NamedTuple):
    """Tokens [b, n, d] between two blocks, and their variance (moment attention only)."""

    mean: Tensor
    variance: Tensor | None


class Transformer(Model):
    """Logits [b, n, vocabulary] of tokens [b, n]; with numbers, predictions of tokens [b, n, vocabulary].

    >>> import torch
    >>> model = Transformer(ModelSettings(vocabulary=11, context=8, attention="tied", placement="peri"), seed=0)
    >>> model(torch.zeros(3, 8, dtype=torch.long)).shape
    torch.Size([3, 8, 11])
    """

    def __init__(self, settings: ModelSettings, *, seed: int) -> None:
        super().__init__()
        s = self.settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Linear(s.vocabulary, s.width) if s.numbers else nn.Embedding(s.vocabulary, s.width)
            self.positions = nn.Parameter(0.02 * torch.randn(s.context, s.width))
            self.blocks = nn.ModuleList(Block(s) for _ in range(1 if s.shared else s.layers))
            self.first = contraction(s.contraction, s.width) if s.placement == "post" else nn.Identity()
            self.last = nn.Identity() if s.placement == "post" else contraction(s.contraction, s.width)
            if not s.numbers:
                nn.init.normal_(self.embedding.weight, std=0.02)
            separate = s.separate or s.numbers
            self.unembedding = nn.Linear(s.width, s.vocabulary, bias=False) if separate else None
        if s.identity or s.frozen:
            for block in self.blocks:
                fix_maps(block.attention.layer, s.identity, s.frozen)  # type: ignore[union-attr, arg-type]

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position."""
        return self.unembed(self.stream(tokens))

    def stream(self, tokens: Tensor) -> Tensor:
        """Tokens [b, n, d] after the last block and its contraction."""
        return self.last(self.states(tokens)[-1].mean)

    def states(self, tokens: Tensor) -> list["State"]:
        """Tokens [b, n, d] and their variance before the first block and after each."""
        return self.states_from(self.embed(tokens))

    def states_from(self, embedded: Tensor) -> list["State"]:
        """States of tokens [b, n, d] that enter the first block."""
        states = [State(embedded, None)]
        for layer in range(self.settings.layers):
            block = self.blocks[0 if self.settings.shared else layer]
            states.append(State(*block(*states[-1], self.settings.objective == "causal")))
        return states

    def embed(self, tokens: Tensor) -> Tensor:
        """Tokens [b, n, d] before the first block: embedding and positions."""
        x = self.embedding(tokens)
        return self.first(self.settings.embedding_scale * (x + self.positions[: x.shape[-2]]))

    def unembed(self, x: Tensor) -> Tensor:
        """Logits by the transposed embedding, or by the unembedding."""
        return nn.functional.linear(x, (self.unembedding or self.embedding).weight)
