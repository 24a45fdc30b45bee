"""Parameters and multiplications of a model, and models of equal cost.

    parameters        all of them, counted on the model
    multiplications   of one token in a forward pass: matrices, and queries times keys and weights times values over
                      half of the context (causal) or all of it (masked); training costs three times as much

Two models that differ in their parts are compared at equal parameters and at equal compute: `matched` changes the
number of hidden units of the feed-forward layers, or the number of layers where there are none.

Read next: transformer.py.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import torch

from gradlogz._errors import InputValueError

from .transformer import ModelSettings, Transformer


class AttentionCost(NamedTuple):
    """Multiplications of an attention layer: matrices of width x width per token, and coordinates per pair of tokens.

    pairs: 2 for keys and values of the size of the head.
    """

    matrices: int
    pairs: float


ATTENTION_COSTS = {
    "softmax": AttentionCost(4, 2),
    "tied": AttentionCost(3, 2),  # W_q, W_k, and W_q again
    "link": AttentionCost(4, 2),
    "gated": AttentionCost(4, 2),
    "mixture": AttentionCost(4, 4),  # W_q, W_k, W_o, variances; keys and values of twice the size
    "moment": AttentionCost(5, 7),  # W_q, W_k, W_o, and variances by W_k and W_o squared; keys of 2, values of 5
    "linear": AttentionCost(4, 0),  # the state of a head: linear_attention below
    "sigmoid": AttentionCost(4, 2),
    "cosine": AttentionCost(4, 2),
    "none": AttentionCost(0, 0),
}
FEED_FORWARD_MATRICES = {"free": 2, "tied": 2, "none": 0}


class Cost(NamedTuple):
    """Parameters of a model, and multiplications of one token in a forward pass."""

    parameters: int
    multiplications: float

    def training_flops(self, tokens: float) -> float:
        """Floating-point operations of training on so many tokens: two per multiplication, three passes."""
        return 6 * self.multiplications * tokens


def cost(settings: ModelSettings) -> Cost:
    """Cost of a model.

    >>> cost(ModelSettings(vocabulary=10, context=16, width=8, heads=2, layers=1, hidden=32)).multiplications
    976.0
    """
    s = settings  # Shorthand
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Transformer(s, seed=0).parameters())
    attention = ATTENTION_COSTS[s.attention]
    visible = s.context / 2 if s.objective == "causal" else s.context
    pairs = visible * attention.pairs * s.width
    if s.attention == "linear":
        pairs = 2 * s.width * s.width / s.heads  # a state of d x d in each head, written and read
    block = attention.matrices * s.width**2 + pairs + FEED_FORWARD_MATRICES[s.feed_forward] * s.width * s.hidden
    return Cost(parameters, float(s.layers * block + s.vocabulary * s.width))


def matched(
    settings: ModelSettings, reference: ModelSettings, by: Literal["parameters", "multiplications"]
) -> ModelSettings:
    """Return the settings whose cost is nearest to that of a reference, by hidden units or else by layers."""
    goal = getattr(cost(reference), by)

    def sized(n: int) -> ModelSettings:
        return replace(settings, layers=n) if settings.feed_forward == "none" else replace(settings, hidden=n)

    def of_size(n: int) -> float:
        return getattr(cost(sized(n)), by)

    if of_size(1) > goal:
        problem = f"the smallest model of these settings has more {by} than the reference"
        raise InputValueError("matched", "reference", problem, "Choose a larger reference, or a smaller width.")
    if of_size(1) == of_size(2):  # shared layers without feed-forward: more layers have no more parameters
        return settings
    # The cost is affine in the size.
    return sized(1 + round((goal - of_size(1)) / (of_size(2) - of_size(1))))
