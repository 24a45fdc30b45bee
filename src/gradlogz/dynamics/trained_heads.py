"""Attention heads of a trained layer, as the attention of a simulated step.

    q_i = (z_i W_q + b_q) R(i),   k_j = (z_j W_k + b_k) R(j),   v_j = z_j W_v + b_v       R: rotary embedding, or I
    A(z)_i = sum_h sum_j a_ij v_j W_o + b_o,    a_ij = softmax_j(beta <q_i, k_j>)

The matrices stay factored, as in the layer. Without biases and rotations A is that of `Ascent` with the QK matrices
B = W_q W_k^T and the transposed OV matrices W_v = h (W_v W_o)^T of its h heads, whose outputs `Ascent` averages.

Read next: evolution.py (the step), layer_norms.py (norms of the layer), ../probing/propagation/layer_dynamics.py (reads
the heads of a model).
"""

from typing import NamedTuple

import torch

from .._errors import InputValueError
from .._typing import Float, Int, Tensor


class Rotation(NamedTuple):
    """A rotary embedding: at position p, coordinates first[i] and second[i] are rotated by the angle of these cosines.

    The table has one row for each position, relative to the first one, at which the rotation is the identity.
    """

    first: Int[Tensor, " k"]
    second: Int[Tensor, " k"]
    cosine: Float[Tensor, "p k"]
    sine: Float[Tensor, "p k"]

    def turned(self, vectors: Float[Tensor, "b h n d"]) -> Float[Tensor, "b h n d"]:
        """Return queries or keys, rotated by their positions 0, ..., n - 1."""
        n, i, j = vectors.shape[-2], self.first, self.second
        if n > len(self.cosine):
            problem = f"the rotary embedding has {len(self.cosine)} positions, but the cloud has {n} tokens"
            raise InputValueError("evolve", "cloud", problem, "Pass fewer tokens, or read the layer on longer inputs.")
        c, s = self.cosine[:n].to(vectors), self.sine[:n].to(vectors)
        x, y = vectors[..., i], vectors[..., j]
        turned = vectors.clone()
        turned[..., i], turned[..., j] = x * c - y * s, x * s + y * c
        return turned


class TrainedHeads(NamedTuple):
    """Matrices and biases of the heads of one layer; shared keys and values are repeated for each head.

    Law: tests/laws/test_trained_layers_are_steps_of_the_simulator.py.
    """

    query: Float[Tensor, "h D d"]
    query_bias: Float[Tensor, "h d"]
    key: Float[Tensor, "h D d"]
    key_bias: Float[Tensor, "h d"]
    value: Float[Tensor, "h D v"]
    value_bias: Float[Tensor, "h v"]
    output: Float[Tensor, "h v D"]
    output_bias: Float[Tensor, " D"]
    rotation: Rotation | None = None

    @property
    def B(self) -> Float[Tensor, "h D D"]:
        """QK matrices W_q W_k^T of the heads."""
        return self.query @ self.key.mT

    @property
    def W_v(self) -> Float[Tensor, "h D D"]:
        """Transposed OV matrices (W_v W_o)^T of the heads, which act on column vectors."""
        return (self.value @ self.output).mT

    def projected(
        self, cloud: Float[Tensor, "b n D"]
    ) -> tuple[Float[Tensor, "b h n d"], Float[Tensor, "b h n d"], Float[Tensor, "b h n v"]]:
        """Return queries, keys and values of the tokens, the first two rotated by their positions."""
        z = cloud.unsqueeze(1)
        q, k, v = (
            z @ W.to(z) + b.to(z).unsqueeze(-2)
            for W, b in ((self.query, self.query_bias), (self.key, self.key_bias), (self.value, self.value_bias))
        )
        return (q, k, v) if self.rotation is None else (self.rotation.turned(q), self.rotation.turned(k), v)

    def joined(self, outputs: Float[Tensor, "b h n v"]) -> Float[Tensor, "b n D"]:
        """Return the sum of the outputs of the heads after the output projection."""
        return torch.einsum("bhnv,hvD->bnD", outputs, self.output.to(outputs)) + self.output_bias.to(outputs)
