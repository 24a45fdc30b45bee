"""Output and row statistics of attention, and how results over blocks of keys are merged.

    r = exp(G_a - G),  G = log(exp G_a + exp G_b)                              [theory 3.8]
    output          = r o_a + (1-r) o_b
    entropy         = r H_a + (1-r) H_b + h(r),   h(r) = -r log r - (1-r) log(1-r)
    logit_variance  = r V_a + (1-r) V_b + r (1-r) (E_a - E_b)^2               likewise the variances of keys and values

Read next: functional.py, which computes them.
"""

from typing import NamedTuple

import torch

from .._errors import InputValueError, shape_of
from .._typing import Bool, Float, Int, Tensor

# In every dtype sigmoid(FAR) is 1 and exp(-FAR) is 0, but products with FAR are finite, unlike those with inf.
FAR = 1000.0
# Masks of models hide keys by the smallest number of a dtype, -65504 in float16 and -3.4e38 in others, to which the
# logit is added; half the first is far below the logits of a row that attends to something.
SEES_NOTHING = -32752.0


class Attention(NamedTuple):
    """Output of attention and statistics of its rows; fields that `statistics` and `fields` leave out are None.

    Logits s are those that enter the softmax: after scale, soft cap, bias and mask; a sink is one more logit. A row
    that sees no key has log_normalizer and max_logit -inf, and 0 in every other field but max_key and min_logit.

    Attributes:
        output: sum_n p_n v_n.
        log_normalizer: G = log sum_n exp s_n.
        entropy: -sum_n p_n log p_n, in nats, from 0 to log n.
        mean_logit: E = sum_n p_n s_n = G - entropy.
        logit_variance: sum_n p_n (s_n - E)^2.
        max_logit: max_n s_n. Its gradient goes to one key that attains it.
        key_mean: sum_n p_n k_n, attention with values = keys.
        key_variance: trace of the covariance of the keys, sum_n p_n |k_n - key_mean|^2: that of the Fisher information.
        value_variance: diagonal of the covariance of the values, sum_n p_n (v_n - output)^2.
        max_key: number of a key that attains the largest logit; -1 in a row that sees no key. A sink is no key here and
            in the next field, and merged results have none of the three.
        min_logit: min_n s_n over the visible keys; inf in a row that sees none.
        first_key_weight: p_n of the first key that the row sees: with a causal mask of key 0, with segments of the
            first key of the document, with a window of the first key in it.
    """

    output: Float[Tensor, "*b m v"]
    log_normalizer: Float[Tensor, "*b m"]
    entropy: Float[Tensor, "*b m"] | None = None
    mean_logit: Float[Tensor, "*b m"] | None = None
    logit_variance: Float[Tensor, "*b m"] | None = None
    max_logit: Float[Tensor, "*b m"] | None = None
    key_mean: Float[Tensor, "*b m d"] | None = None
    key_variance: Float[Tensor, "*b m"] | None = None
    value_variance: Float[Tensor, "*b m v"] | None = None
    max_key: Int[Tensor, "*b m"] | None = None
    min_logit: Float[Tensor, "*b m"] | None = None
    first_key_weight: Float[Tensor, "*b m"] | None = None

    @property
    def seen(self) -> Bool[Tensor, "*b m"]:
        """True for rows that see a key. Leave the others out of a z-loss or a mean of maxima.

        A row of a finite mask that hides every key counts as seeing none: its log normaliser is at most SEES_NOTHING.
        """
        return ~(self.log_normalizer <= SEES_NOTHING)

    @property
    def lse(self) -> Float[Tensor, "*b m"]:
        """The log normaliser, by its name in torch's flex_attention."""
        return self.log_normalizer

    @property
    def max_scores(self) -> Float[Tensor, "*b m"] | None:
        """The largest logit, by its name in torch's flex_attention."""
        return self.max_logit

    def __repr__(self) -> str:
        """Names, dtypes and shapes of the fields."""
        fields = (f"{name}={_summary(t)}" for name, t in zip(self._fields, self, strict=True) if t is not None)
        return f"Attention({', '.join(fields)})"

    def joined(self, other: "Attention") -> "Attention":
        """Result over the keys of both; fields that either lacks are None. `merge(a, b)` calls this."""
        if self.output.shape != other.output.shape or self.log_normalizer.shape != other.log_normalizer.shape:
            fact = f"shapes {shape_of(self.output)} and {shape_of(other.output)}"
            remedy = "Call attend with the same queries for each block of keys, and with values of one size."
            raise InputValueError("merge", "other", f"both results must have the same queries, got {fact}", remedy)
        G_a, G_b = self.log_normalizer, other.log_normalizer
        empty_a, empty_b = G_a == -torch.inf, G_b == -torch.inf
        # A block without visible keys is FAR below the other, where it has no weight; G is -inf if both are such.
        # Farther apart nothing changes, and products with a larger x would overflow.
        G_a, G_b = G_a.masked_fill(empty_a, 0.0), G_b.masked_fill(empty_b, 0.0)
        x = (G_a - G_b).clamp(-FAR, FAR)
        x = x.masked_fill(empty_a & ~empty_b, -FAR).masked_fill(empty_b & ~empty_a, FAR)
        r, rest = torch.sigmoid(x), torch.sigmoid(-x)
        both = r * rest
        # Both are even in x. The sign is not differentiated: no exponential overflows, and there is no kink at 0.
        larger = torch.where(x.detach() < 0, G_b, G_a)
        gap = torch.where(x.detach() < 0, -x, x)
        log_normalizer = (larger + torch.log1p(torch.exp(-gap))).masked_fill(empty_a & empty_b, -torch.inf)

        def mean(a: Tensor, b: Tensor) -> Tensor:
            gate, other_gate = (r, rest) if a.ndim == r.ndim else (r.unsqueeze(-1), rest.unsqueeze(-1))
            return (gate * a + other_gate * b).to(a.dtype)

        def variance(a: Tensor, b: Tensor, mean_a: Tensor, mean_b: Tensor) -> Tensor:
            gate = both if a.ndim == both.ndim else both.unsqueeze(-1)
            difference = mean_a.to(a.dtype) - mean_b.to(a.dtype)
            # Where one block has all the weight, the distance to the other must not matter, even if it is infinite.
            squared = difference.masked_fill(
                (gate == 0) if difference.ndim == gate.ndim else (gate == 0).unsqueeze(-1), 0.0
            ).square()
            return mean(a, b) + gate * (squared if squared.ndim == a.ndim else squared.sum(-1))

        def averaged(name: str) -> Tensor | None:
            a, b = getattr(self, name), getattr(other, name)
            return None if a is None or b is None else mean(a, b)

        def spread(name: str, center: str) -> Tensor | None:
            pair = getattr(self, name), getattr(other, name), getattr(self, center), getattr(other, center)
            return None if any(t is None for t in pair) else variance(*pair)

        entropy, max_logit = averaged("entropy"), None
        if entropy is not None:
            gate_entropy = torch.log1p(torch.exp(-gap)) + gap * torch.sigmoid(-gap)
            entropy = entropy + gate_entropy.masked_fill(empty_a & empty_b, 0.0)
        if self.max_logit is not None and other.max_logit is not None:
            max_logit = torch.maximum(self.max_logit, other.max_logit)
        # Made in one call: torch.compile of torch 2.11 cannot return the result of _replace.
        return Attention(
            mean(self.output, other.output),
            log_normalizer,
            entropy,
            averaged("mean_logit"),
            spread("logit_variance", "mean_logit"),
            max_logit,
            averaged("key_mean"),
            spread("key_variance", "key_mean"),
            spread("value_variance", "output"),
        )


torch.serialization.add_safe_globals([Attention])  # for torch.load with weights_only=True


def by_heads(statistic: Tensor) -> Float[Tensor, "b h m"]:
    """Reshape a statistic to [b, h, m]: batch and heads may be missing, or have several dimensions."""
    if statistic.ndim > 3:
        return statistic.flatten(0, -3)
    return statistic.reshape(*(1,) * (3 - statistic.ndim), *statistic.shape)


def _summary(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
