"""Record of the weight matrices of the heads of a layer.

    q = z W_q + b_q      z: input of the layer, [D]; likewise keys and values
    u = o W_o + b_o      o: concatenated outputs of the heads

Read next: weights.py (how they are computed), rotary.py (the rotation of queries and keys).
"""

from typing import NamedTuple

import torch

from ..._typing import Float, Int, Tensor
from .architecture import Norm


class Turning(NamedTuple):
    """A rotary embedding: coordinates first[i] and second[i] are rotated by distance * angle[i], others not at all."""

    first: Int[Tensor, " k"]
    second: Int[Tensor, " k"]
    angle: Float[Tensor, " k"]
    size: int

    def matrix(self, cosine: Float[Tensor, "*b k"], sine: Float[Tensor, "*b k"]) -> Float[Tensor, "*b d d"]:
        """Return the matrix [d, d], acting on row vectors, of rotations with these (or averaged) cosines and sines."""
        R = torch.eye(self.size, dtype=cosine.dtype).repeat(*cosine.shape[:-1], 1, 1)
        i, j = self.first, self.second
        R[..., i, i] = R[..., j, j] = cosine
        R[..., i, j] = sine
        R[..., j, i] = -sine
        return R

    @property
    def still(self) -> Int[Tensor, " s"]:
        """Coordinates that are not rotated within a window, up to rounding."""
        turned = torch.zeros(self.size, dtype=torch.bool)
        turned[self.first] = turned[self.second] = True
        return (~turned).nonzero().squeeze(-1)

    def error(self, vectors: Float[Tensor, "t p d"], places: Int[Tensor, " p"]) -> float:
        """Return the largest relative distance of vectors at these positions from the rotated first vectors."""
        phase = (places - places[0]).unsqueeze(-1) * self.angle
        expected = torch.einsum("td,pde->tpe", vectors[:, 0], self.matrix(phase.cos(), phase.sin()))
        return float((expected - vectors).norm(dim=-1).max() / vectors.norm(dim=-1).max())


class HeadWeights(NamedTuple):
    """The weight matrices of the heads of one layer, in float64 on the CPU; shared keys and values are repeated.

    norm: norm whose output the layer reads, None if it reads the residual stream itself.
    rotary: whether queries and keys are rotated by their positions.
    normalized: whether the layer normalises queries and keys, so that the matrices determine their directions only.
    turning: rotation angles, or the reason why they are unknown; None if not rotary.
    """

    query: Float[Tensor, "h D d"]
    query_bias: Float[Tensor, "h d"]
    key: Float[Tensor, "h D d"]
    key_bias: Float[Tensor, "h d"]
    value: Float[Tensor, "h D v"]
    value_bias: Float[Tensor, "h v"]
    output: Float[Tensor, "h v D"] | None
    norm: Norm | None
    rotary: bool
    normalized: bool
    turning: Turning | str | None = None
    output_bias: Float[Tensor, " D"] | None = None

    @property
    def folded(self) -> "HeadWeights":
        """Weights with the gain and bias of the norm absorbed: they act on tokens normalised without gain and bias."""
        if self.norm is None:
            return self
        gain, shift = self.norm.gain.unsqueeze(-1), self.norm.bias

        def bias(W: Tensor, b: Tensor) -> Tensor:
            return b + torch.einsum("e,hed->hd", shift, W)

        return self._replace(
            query=gain * self.query, query_bias=bias(self.query, self.query_bias),
            key=gain * self.key, key_bias=bias(self.key, self.key_bias),
            value=gain * self.value, value_bias=bias(self.value, self.value_bias), norm=None,
        )  # fmt: skip


def still_share(
    turning: Turning, query: Float[Tensor, "h D d"], key: Float[Tensor, "h D d"]
) -> Float[Tensor, " h"] | None:
    """Return |M_s|² / (|M_s|² + |M_t|²), M_s the unrotated, M_t the rotated part of W_q W_kᵀ; None if one is empty."""
    still = turning.still
    if len(still) in (0, turning.size):
        return None
    rest = torch.cat((turning.first, turning.second))
    parts = [((query[..., c].mT @ query[..., c]) * (key[..., c].mT @ key[..., c])).sum((-2, -1)) for c in (still, rest)]
    return parts[0] / (parts[0] + parts[1])


def centred(W: Float[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """Return (I - 11ᵀ/D) W along the axis of the stream: the part of W that acts on the output of a centring norm."""
    return W - W.mean(axis, keepdim=True)
