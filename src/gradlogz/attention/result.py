"""What one call of attention knows of its rows, and how results over blocks of keys join.

    r = exp(G_a - G),  G = log(exp G_a + exp G_b)                              [theory 3.8]
    output          = r o_a + (1-r) o_b
    entropy         = r H_a + (1-r) H_b + h(r),   h(r) = -r log r - (1-r) log(1-r)
    logit_variance  = r V_a + (1-r) V_b + r (1-r) (E_a - E_b)^2               likewise the variances of keys and values

Read next: functional.py, which fills it.
"""

from typing import NamedTuple

import torch

from .._errors import InputValueError, shape_of
from .._typing import Bool, Float, Tensor

# sigmoid of this is 1 and exp of its negative 0 in every dtype; products with it are finite, with inf they are not.
FAR = 1000.0


class Attention(NamedTuple):
    """The output of attention and the statistics of its rows; None where `statistics` did not ask for them.

    Logits s are those that enter the softmax: after scale, soft cap, bias and mask, a sink being one more of them. A
    row that sees no key has output 0, log_normalizer and max_logit -inf, everything else 0.

    Attributes:
        output: sum_n p_n v_n.
        log_normalizer: G = log sum_n exp s_n.
        entropy: -sum_n p_n log p_n, in nats, from 0 to log n.
        mean_logit: E = sum_n p_n s_n = G - entropy.
        logit_variance: sum_n p_n (s_n - E)^2.
        max_logit: max_n s_n. Its gradient goes to one key that attains it.
        key_mean: sum_n p_n k_n, attention with values = keys.
        key_variance: the trace of the covariance of the keys, sum_n p_n |k_n - key_mean|^2: of the Fisher information.
        value_variance: the diagonal of the covariance of the values, sum_n p_n (v_n - output)^2.
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

    @property
    def seen(self) -> Bool[Tensor, "*b m"]:
        """Whether a row sees any key: leave the others out of a z-loss or a mean of maxima, where they are infinite."""
        return self.log_normalizer != -torch.inf

    def __repr__(self) -> str:
        """Dtypes and shapes, not numbers."""
        given = (f"{name}={_summary(t)}" for name, t in zip(self._fields, self, strict=True) if t is not None)
        return f"Attention({', '.join(given)})"

    def joined(self, other: "Attention") -> "Attention":
        """The result over the keys of both; what either lacks is None.  `merge(a, b)` is this."""
        if self.output.shape != other.output.shape or self.log_normalizer.shape != other.log_normalizer.shape:
            fact = f"shapes {shape_of(self.output)} and {shape_of(other.output)}"
            remedy = "Attend with the same queries to each block of keys, and to values of one dimension."
            raise InputValueError("merge", "other", f"both results must be of the same queries, got {fact}", remedy)
        G_a, G_b = self.log_normalizer, other.log_normalizer
        dead_a, dead_b = G_a == -torch.inf, G_b == -torch.inf
        # A part without mass lies so far below the other that it counts nothing; two of them are told apart at the end.
        G_a, G_b = (
            torch.where(dead_a, G_b.masked_fill(dead_b, 0.0) - FAR, G_a),
            torch.where(dead_b, G_a.masked_fill(dead_a, 0.0) - FAR, G_b),
        )
        x = G_a - G_b
        r, rest = torch.sigmoid(x), torch.sigmoid(-x)
        both = r * rest
        # All is even in x: by its sign, which is not differentiated, no exponential grows and no kink appears at 0.
        larger = torch.where(x.detach() < 0, G_b, G_a)
        gap = torch.where(x.detach() < 0, -x, x)
        log_normalizer = (larger + torch.log1p(torch.exp(-gap))).masked_fill(dead_a & dead_b, -torch.inf)

        def mean(a: Tensor, b: Tensor) -> Tensor:
            gate, other_gate = (r, rest) if a.ndim == r.ndim else (r.unsqueeze(-1), rest.unsqueeze(-1))
            return (gate * a + other_gate * b).to(a.dtype)

        def variance(a: Tensor, b: Tensor, mean_a: Tensor, mean_b: Tensor) -> Tensor:
            gate = both if a.ndim == both.ndim else both.unsqueeze(-1)
            away = mean_a.to(a.dtype) - mean_b.to(a.dtype)
            # Where one part has all the weight, how far the other is must not matter, even if that is far.
            apart = away.masked_fill((gate == 0) if away.ndim == gate.ndim else (gate == 0).unsqueeze(-1), 0.0).square()
            return mean(a, b) + gate * (apart if apart.ndim == a.ndim else apart.sum(-1))

        def averaged(name: str) -> Tensor | None:
            a, b = getattr(self, name), getattr(other, name)
            return None if a is None or b is None else mean(a, b)

        def spread(name: str, of: str) -> Tensor | None:
            pair = getattr(self, name), getattr(other, name), getattr(self, of), getattr(other, of)
            return None if any(t is None for t in pair) else variance(*pair)

        entropy, max_logit = averaged("entropy"), None
        if entropy is not None:
            of_gate = torch.log1p(torch.exp(-gap)) + gap * torch.sigmoid(-gap)
            entropy = entropy + of_gate.masked_fill(dead_a & dead_b, 0.0)
        if self.max_logit is not None and other.max_logit is not None:
            max_logit = torch.maximum(self.max_logit, other.max_logit)
        # Made once: a compiler of torch 2.11 cannot return what _replace gives.
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


def _summary(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
