"""A link before the dot product: attention for tokens that are means of an exponential family.

    u        a token: the mean of a sufficient statistic, E[x]
    link(u)  = ∇G*(u) = (∇G)⁻¹(u) = eta                      its natural parameter: the query       [theory 3.6]
    logits   = <W_q link(u_m), W_k u_n> / sqrt(d)            exp<eta_m, u_n> with W = I             [theory E57]

    gaussian   any real numbers               link(u) = u                          ordinary attention
    poisson    counts, u > 0                  log u
    gamma      lengths of time, u > 0         1 - 1 / u
    spins      u in (-1, 1)                   atanh u
    one_hot    a simplex in each head         log u - mean(log u)
    sphere     a unit ball in each head       u k / |u|, where I_{d/2}(k) / I_{d/2-1}(k) = |u|      [banerjee05]

These are the unit members: N(0, I), Poisson(1), Gamma(1, 1), fair spins, equal probabilities, the unit sphere. Others
differ by a translation of eta, which the bias of W_q learns.   [shim22, Prop. 1b]

Read next: ../../measures/exponential.py (the families), ../../measures/duality.py (`link` of any measure, by Newton's
method).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn

from ..._errors import InputValueError, has_values
from ..._typing import Bool, Float, Tensor
from ...special.bessel import radial
from ..functional import attend
from ..result import Attention
from .heads import check_sizes, check_tokens, join, split, statistics_of_forward

Family = Literal["gaussian", "poisson", "gamma", "spins", "one_hot", "sphere"]
NEWTON_STEPS = 4  # from the guess of [banerjee05], within a few percent; three steps leave an error of 1e-10


class LinkAttention(nn.Module):
    """Multi-head attention whose queries are natural parameters of a chosen family, its keys sufficient statistics.

    Section 6 of the paper: tokens of a family other than the Gaussian need a non-linear link before the dot product.
    For counts it is the logarithm, for probabilities log-odds or log-probabilities, which W_q then need not learn.

    Cost: that of multi-head attention and the link, which is elementwise except for the sphere (four sums of 181 terms
    for each token and head). When not to use it: for tokens of a residual stream, which are not means of a sufficient
    statistic; map them into the domain first (softplus, tanh, softmax over each head).

    Args:
        family: the exponential family of the tokens; "gaussian" is ordinary multi-head attention.
        project: False leaves out W_q and W_k, so that the logits are <link(u_m), u_n> / sqrt(d).
        margin: tokens closer than this to the boundary of the domain, where the link is infinite, are moved inside.
        validate: raise for tokens outside the domain; on a GPU this synchronizes with the device.

    Law: tests/laws/test_links_invert_means.py.

    >>> import torch
    >>> from gradlogz import Poisson
    >>> layer, u = LinkAttention(4, 1, family="poisson", project=False, bias=False), torch.rand(5, 4) + 0.1
    >>> eta = layer.link(u)
    >>> torch.allclose(Poisson(torch.ones(4)).mean(eta), u)
    True
    >>> by_hand = (eta @ u.mT / 2).softmax(-1) @ layer.v_proj(u)
    >>> torch.allclose(layer(u), layer.out_proj(by_hand), atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        family: Family,
        project: bool = True,
        bias: bool = True,
        margin: float = 1e-6,
        validate: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("LinkAttention", embed_dim, num_heads)
        if family not in get_args(Family):
            condition = f"family must be one of {', '.join(get_args(Family))}"
            remedy = "For another measure apply gradlogz.measures.mean_to_natural to the tokens, in eager mode."
            raise InputValueError("LinkAttention", "family", f"{condition}, got {family!r}", remedy)
        if family == "sphere" and embed_dim == num_heads:
            problem = "embed_dim / num_heads must be at least 2 coordinates for a sphere, got 1"
            raise InputValueError("LinkAttention", "embed_dim", problem, 'Use family="spins" in one dimension.')
        super().__init__()
        self.embed_dim, self.num_heads, self.family, self.project = embed_dim, num_heads, family, project
        self.margin, self.validate = margin, validate
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        if project:
            self.q_proj, self.k_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))
        self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias, **options) for _ in range(2))

    def forward(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
    ) -> Float[Tensor, "*b m d"]:
        """Output of the layer.

        Args:
            query: tokens of the queries, inside the domain of the family.
            key: tokens of the keys and values, in the domain or not; by default those of the queries.
            attn_mask: as in `attend`: bool, True = attend, or added to the logits; broadcasts against [*b, h, m, n].
        """
        statistics = statistics_of_forward()
        return self.attend(query, key, attn_mask=attn_mask, is_causal=is_causal, statistics=statistics)[0]

    def attend(
        self,
        query: Float[Tensor, "*b m d"],
        key: Float[Tensor, "*b n d"] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        statistics: Literal["none", "scalar", "moments"] = "scalar",
    ) -> tuple[Float[Tensor, "*b m d"], Attention]:
        """Output, and statistics of each head [*b, h, m]."""
        key = query if key is None else key
        check_tokens("LinkAttention", self.embed_dim, query=query, key=key)
        eta, statistic = self.link(query), key
        if self.project:
            eta, statistic = self.q_proj(eta), self.k_proj(statistic)
        v = self.v_proj(key)
        q, k, v = (split(t.to(v.dtype), self.num_heads) for t in (eta, statistic, v))
        result = attend(q, k, v, attn_mask=attn_mask, is_causal=is_causal, statistics=statistics)
        return self.out_proj(join(result.output)), result

    def link(self, tokens: Float[Tensor, "*bn d"]) -> Float[Tensor, "*bn d"]:
        """Natural parameters of tokens, head by head: the inverse of the mean map of the family."""
        family, u = FAMILIES[self.family], tokens.unflatten(-1, (self.num_heads, -1))
        if self.validate and has_values(u):
            outside = int((~family.inside(u.detach())).sum())
            if outside:
                fact = f"{outside} of {u[..., 0].numel()} heads of tokens are not"
                problem = f"tokens must be {family.domain}, but {fact}"
                raise InputValueError("LinkAttention", "tokens", problem, "Map them into the domain first.")
        return family.link(u, max(self.margin, torch.finfo(u.dtype).eps)).flatten(-2)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, family={self.family!r}, project={self.project}"


class UnitFamily(NamedTuple):
    """Domain of the means of a family, the test for tokens [..., d] inside it, and the link."""

    domain: str
    inside: Callable[[Tensor], Tensor]
    link: Callable[[Tensor, float], Tensor]


def _one_hot(u: Tensor, margin: float) -> Tensor:
    logarithm = u.clamp(min=margin).log()
    return logarithm - logarithm.mean(-1, keepdim=True)  # the link of least norm; adding a constant changes no mean


def _sphere(u: Tensor, margin: float) -> Tensor:
    """w u with w A(w |u|) / (w |u|) = 1, A the ratio of Bessel functions; a function of |u|², smooth at 0.

    Newton's method on F(w) = w a(w² |u|²) - 1, a(k²) = A(k) / k; the last step carries the derivative of the implicit
    function.
    """
    d, exact = u.shape[-1], u.to(torch.promote_types(u.dtype, torch.float32))
    square = exact.square().sum(-1)
    shrink = (square.clamp(min=(1 - margin) ** 2).rsqrt() * (1 - margin)).unsqueeze(-1)
    exact = exact * shrink  # shrink it to norm 1 - margin if it is longer
    square = exact.square().sum(-1)
    w = ((d - square) / (1 - square)).detach()
    for step in range(NEWTON_STEPS):
        s = square if step == NEWTON_STEPS - 1 else square.detach()
        _, a, b = radial(w.square() * s, d)
        w = w - (w * a - 1) / (a + w.square() * s * b).detach()
    return (w.unsqueeze(-1) * exact).to(u.dtype)


TOLERANCE = 1e-3  # of sums and norms that are 1 up to rounding, in any dtype

FAMILIES: dict[str, UnitFamily] = {
    "gaussian": UnitFamily("finite", lambda u: u.isfinite().all(-1), lambda u, _: u),
    "poisson": UnitFamily("nonnegative", lambda u: (u >= 0).all(-1), lambda u, margin: u.clamp(min=margin).log()),
    "gamma": UnitFamily("nonnegative", lambda u: (u >= 0).all(-1), lambda u, margin: 1 - 1 / u.clamp(min=margin)),
    "spins": UnitFamily(
        "in [-1, 1]", lambda u: (u.abs() <= 1).all(-1), lambda u, margin: u.clamp(margin - 1, 1 - margin).atanh()
    ),
    "one_hot": UnitFamily(
        "probabilities in each head",
        lambda u: (u >= 0).all(-1) & ((u.sum(-1) - 1).abs() <= TOLERANCE),
        _one_hot,
    ),
    "sphere": UnitFamily("in the unit ball in each head", lambda u: u.norm(dim=-1) <= 1 + TOLERANCE, _sphere),
}
