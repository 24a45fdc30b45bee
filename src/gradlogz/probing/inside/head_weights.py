"""The matrices of the heads of a layer, as a record.

    q = z W_q + b_q      z: what the layer reads, [D]; likewise keys and values
    u = o W_o + b_o      o: the outputs of the heads, side by side

Read next: weights.py (how they are found), rotary.py (how queries and keys turn).
"""

from typing import NamedTuple

import torch

from ..._typing import Float, Int, Tensor
from .architecture import Norm


class Turning(NamedTuple):
    """The coordinates first[i] and second[i] turn by distance * angle[i], from the first to the second; others stay."""

    first: Int[Tensor, " k"]
    second: Int[Tensor, " k"]
    angle: Float[Tensor, " k"]
    size: int

    def matrix(self, cosine: Float[Tensor, "*b k"], sine: Float[Tensor, "*b k"]) -> Float[Tensor, "*b d d"]:
        """The matrix on rows, [d, d], of turns with these cosines and sines, or of averages of them."""
        R = torch.eye(self.size, dtype=cosine.dtype).repeat(*cosine.shape[:-1], 1, 1)
        i, j = self.first, self.second
        R[..., i, i] = R[..., j, j] = cosine
        R[..., i, j] = sine
        R[..., j, i] = -sine
        return R

    @property
    def still(self) -> Int[Tensor, " s"]:
        """The coordinates that stay, by rounding, as far as a window goes."""
        turned = torch.zeros(self.size, dtype=torch.bool)
        turned[self.first] = turned[self.second] = True
        return (~turned).nonzero().squeeze(-1)

    def error(self, found: Float[Tensor, "t p d"], places: Int[Tensor, " p"]) -> float:
        """How far vectors at these places are from those at the first place, turned: over the longest of them."""
        phase = (places - places[0]).unsqueeze(-1) * self.angle
        expected = torch.einsum("td,pde->tpe", found[:, 0], self.matrix(phase.cos(), phase.sin()))
        return float((expected - found).norm(dim=-1).max() / found.norm(dim=-1).max())


class HeadWeights(NamedTuple):
    """The matrices of the heads of one layer, in float64 on the CPU; heads that share keys have them each.

    norm: the norm whose output the layer reads, None if it reads the stream as it is.
    rotary: whether queries and keys are turned by their positions.
    normalized: whether they are divided by their lengths, so that the matrices give their directions alone.
    turning: by which angles, if rotary, or the reason why there are none; None if not rotary.
    """

    query: Float[Tensor, "h D d"]
    query_bias: Float[Tensor, "h d"]
    key: Float[Tensor, "h D d"]
    key_bias: Float[Tensor, "h d"]
    value: Float[Tensor, "h D v"]
    value_bias: Float[Tensor, "h v"]
    output: Float[Tensor, "h v D"] | None
    scale: float
    norm: Norm | None
    rotary: bool
    normalized: bool
    turning: Turning | str | None = None

    @property
    def folded(self) -> "HeadWeights":
        """The same with the gain and the bias of the norm inside: they act on tokens that are only normalised."""
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
    """|M_s|² / (|M_s|² + |M_t|²) of the parts of W_q W_kᵀ that stay and turn; None where all or none turns."""
    still = turning.still
    if len(still) in (0, turning.size):
        return None
    rest = torch.cat((turning.first, turning.second))
    parts = [((query[..., c].mT @ query[..., c]) * (key[..., c].mT @ key[..., c])).sum((-2, -1)) for c in (still, rest)]
    return parts[0] / (parts[0] + parts[1])


def centred(W: Float[Tensor, "..."], axis: int) -> Float[Tensor, "..."]:
    """(I - 11ᵀ/D) W on the axis of the stream: what a norm that centres can see."""
    return W - W.mean(axis, keepdim=True)
