"""Multi-head attention as in torch.nn, with the statistics of every head.

    q = x W_q,  k = y W_k,  v = z W_v,  each split into heads       [vaswani17, Eq. 4-5]
    o_h    = ∇_omega G_h(q, omega) at omega = 0 = softmax(q_h k_h^T / sqrt(d)) v_h
    G_h    = log sum_n exp(<q_h, k_hn> / sqrt(d) + <v_hn, omega>)   the measure of a head: its keys and values
    output = concat_h(o_h) W_o                                      the mean of a convolution of the heads  [theory 3.9]

Read next: gated.py (heads as a mixture), ../functional.py (attention in one head).
"""

from typing import Any, Literal

import torch
from torch import nn
from torch.nn.functional import dropout, linear, pad

from ..._errors import InputTypeError, InputValueError, shape_of
from ..._typing import Bool, Float, Tensor
from ...special import log_domain
from ..functional import attend
from ..result import Attention
from .heads import check_sizes, join, split, statistics_of_forward

# Attributes of torch's layer.
SIZES = (
    "embed_dim", "kdim", "vdim", "_qkv_same_embed_dim", "num_heads", "head_dim", "dropout", "batch_first",
    "add_zero_attn",
)  # fmt: skip
PARAMETERS = (
    "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v"
)  # fmt: skip


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with the log normaliser, entropy and logit moments of every head.

    A drop-in replacement: arguments, initial values under a seed, parameters and their names, masks (True = do not
    attend) and results are those of torch, and state dicts load in both directions. `attend` is `forward` with the
    statistics; the layer stores nothing between calls. All statistics are differentiable, so that the entropy or a
    z-loss of a head can be part of a loss.

    Differences from torch.nn.MultiheadAttention:
      - For a query that may see no key, the output is the bias of the output projection and the weights are 0; torch
        returns NaN.
      - `is_causal` is still a hint that attn_mask is causal, so that it need not be read, but works without a mask.
      - `out_proj` is called as a module, so that its hooks and adapters run.
    In evaluation without gradients, `nn.TransformerEncoderLayer` computes by a fused operator from the weights of this
    layer without calling it; `torch.backends.mha.set_fastpath_enabled(False)` disables that.

    Cost: that of `attend`, linear memory; need_weights=True (torch's default) computes the h x m x n weights.
    Law: tests/agreement/test_multihead_attention_agrees_with_torch.py.

    >>> import torch
    >>> theirs, x = torch.nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    >>> ours = MultiheadAttention.from_torch(theirs)
    >>> output, heads = ours.attend(x, x, x)
    >>> heads.entropy.shape
    torch.Size([2, 4, 5])
    >>> torch.allclose(output, theirs(x, x, x)[0], atol=1e-6)
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_sizes("MultiheadAttention", embed_dim, num_heads)
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> "MultiheadAttention":
        """Layer that shares its parameters and its output projection with a torch module: training one trains both."""
        if not isinstance(module, nn.MultiheadAttention):
            condition = "module must be a torch.nn.MultiheadAttention"
            remedy = "To convert a model, replace each of its modules of that class."
            raise InputTypeError(
                "MultiheadAttention.from_torch", "module", f"{condition}, got {type(module).__name__}", remedy
            )
        layer = cls.__new__(cls)  # without the constructor, which draws parameters
        nn.Module.__init__(layer)
        for name in SIZES:
            setattr(layer, name, getattr(module, name))
        for name in PARAMETERS:
            if (parameter := getattr(module, name)) is None:
                layer.register_parameter(name, None)
            else:  # under a parametrization a tensor, computed from its parameters
                setattr(layer, name, parameter)
        layer.out_proj, layer.training = module.out_proj, module.training
        return layer

    def forward(
        self,
        query: Float[Tensor, "..."],
        key: Float[Tensor, "..."],
        value: Float[Tensor, "..."],
        key_padding_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        need_weights: bool = True,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."] | None]:
        """Output, and weights averaged over heads or of each head, as torch.nn.MultiheadAttention.forward.

        Args:
            query: [b, m, embed_dim] if batch_first, else [m, b, embed_dim]; [m, embed_dim] without a batch.
            key: in the same layout, n tokens of size kdim.
            value: in the same layout, n tokens of size vdim.
            key_padding_mask: [b, n] or [n]; bool, True = leave the key out, or float, added to the logits.
            need_weights: False for linear memory.
            attn_mask: [m, n] or [b h, m, n]; bool, True = do not attend, or float, added to the logits.
            is_causal: attn_mask, if there is one, is the causal mask.
        """
        if not need_weights:
            statistics = statistics_of_forward()
            output, _ = self.attend(
                query, key, value, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal, statistics=statistics
            )
            return output, None
        q, k, v = self._project(query, key, value)
        mask, bias, _ = self._sight(key_padding_mask, attn_mask, is_causal, q, k, hint=False)
        s = (q * q.shape[-1] ** -0.5) @ k.mT
        s = s if bias is None else s + bias
        p = log_domain.softmax(s if mask is None else s.masked_fill(~mask, -torch.inf))
        p = dropout(p, self.dropout, self.training)
        weights = p.mean(1) if average_attn_weights else p
        return self._output(p.to(v.dtype) @ v, query.ndim == 2), weights.squeeze(0) if query.ndim == 2 else weights

    def attend(
        self,
        query: Float[Tensor, "..."],
        key: Float[Tensor, "..."],
        value: Float[Tensor, "..."],
        key_padding_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
        statistics: Literal["none", "scalar", "moments"] = "scalar",
    ) -> tuple[Float[Tensor, "..."], Attention]:
        """Output of the layer, and the result of `gradlogz.attend` in each head: statistics [b, h, m] or [h, m].

        The `output` of that result is [b, h, m, d], before the heads are joined and projected.
        """
        result = attend(
            **self.arguments(query, key, value, key_padding_mask, attn_mask=attn_mask, is_causal=is_causal),
            statistics=statistics,
        )
        output = self._output(result.output, query.ndim == 2)
        if query.ndim == 2:
            result = Attention._make(None if t is None else t.squeeze(0) for t in result)
        return output, result

    def arguments(
        self,
        query: Float[Tensor, "..."],
        key: Float[Tensor, "..."],
        value: Float[Tensor, "..."],
        key_padding_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        *,
        attn_mask: Bool[Tensor, "..."] | Float[Tensor, "..."] | None = None,
        is_causal: bool = False,
    ) -> dict[str, Any]:
        """Arguments of the layer for `gradlogz.attend`: query, key and value of each head, and masks."""
        q, k, v = self._project(query, key, value)
        mask, bias, causal = self._sight(key_padding_mask, attn_mask, is_causal, q, k, hint=True)
        dropout_p = self.dropout if self.training else 0.0
        return {
            "query": q, "key": k, "value": v, "attn_mask": mask, "bias": bias, "is_causal": causal,
            "dropout_p": dropout_p,
        }  # fmt: skip

    def extra_repr(self) -> str:
        sizes = f"{self.embed_dim}, num_heads={self.num_heads}"
        if not self._qkv_same_embed_dim:
            sizes += f", kdim={self.kdim}, vdim={self.vdim}"
        options = ("dropout", "add_zero_attn", "batch_first")
        chosen = [f"{name}={getattr(self, name)}" for name in options if getattr(self, name)]
        chosen += ["bias=False"] * (self.in_proj_bias is None) + ["add_bias_kv=True"] * (self.bias_k is not None)
        return ", ".join([sizes, *chosen])

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [b, h, m, d], keys and values [b, h, n, d], including the keys that the layer adds."""
        self._check(query, key, value)
        if self._qkv_same_embed_dim and query is key and key is value:
            projected = linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.chunk(3)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            projected = tuple(map(linear, (query, key, value), weights, biases))
        batched = query.ndim == 3
        q, k, v = (
            split(t if not batched or self.batch_first else t.transpose(0, 1), self.num_heads) for t in projected
        )
        if not batched:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat((t, split(added.to(t.dtype), self.num_heads).expand(t.shape[0], -1, -1, -1)), -2)
                for t, added in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))
        return q, k, v

    def _output(self, per_head: Tensor, unbatched: bool) -> Tensor:
        joined = join(per_head)
        if unbatched:
            return self.out_proj(joined.squeeze(0))
        return self.out_proj(joined if self.batch_first else joined.transpose(0, 1))

    def _sight(
        self,
        key_padding_mask: Tensor | None,
        attn_mask: Tensor | None,
        is_causal: bool,
        q: Tensor,
        k: Tensor,
        *,
        hint: bool,
    ) -> tuple[Tensor | None, Tensor | None, bool]:
        """Mask of visible keys, bias of the logits, and `is_causal` for `attend`.

        Neither is expanded: a mask of keys stays [b, 1, 1, n].
        """
        added = int(self.bias_k is not None) + int(self.add_zero_attn)  # keys that the layer adds, always visible
        b, _, m, _ = q.shape
        n = k.shape[-2] - added
        self._check_masks(key_padding_mask, attn_mask, is_causal, (b, m, n))
        causal = is_causal and hint and m == n and added == 0
        if causal:
            attn_mask = None
        elif is_causal and attn_mask is None:
            attn_mask = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(1)
        mask = bias = None
        if attn_mask is not None:
            pairs = attn_mask if attn_mask.ndim == 2 else attn_mask.unflatten(0, (b, self.num_heads))
            mask, bias = (~pairs, None) if pairs.dtype == torch.bool else (None, pairs)
        if key_padding_mask is not None:
            keys = key_padding_mask.reshape(b, 1, 1, n)
            if keys.dtype == torch.bool and mask is None:
                mask = ~keys
            else:
                if keys.dtype == torch.bool:
                    keys = torch.zeros(keys.shape, dtype=q.dtype, device=q.device).masked_fill(keys, -torch.inf)
                bias = keys if bias is None else bias + keys
        if added:
            mask = None if mask is None else pad(mask, (0, added), value=True)
            bias = None if bias is None else pad(bias, (0, added))
        return mask, bias, causal

    def _check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        batch, sizes = 0 if self.batch_first else 1, (self.embed_dim, self.kdim, self.vdim)
        if not (query.ndim == key.ndim == value.ndim and query.ndim in (2, 3)):
            condition = "query, key and value must all be [b, tokens, size] or all [tokens, size]"
            remedy = "Flatten further dimensions into one batch dimension."
        elif (query.shape[-1], key.shape[-1], value.shape[-1]) != sizes:
            condition = f"query, key and value must end in dimensions {sizes}"
            remedy = "Pass tokens of sizes embed_dim, kdim and vdim."
        elif key.shape[:-1] != value.shape[:-1] or (query.ndim == 3 and query.shape[batch] != key.shape[batch]):
            condition = "value must have a token for each key, and query, key and value one batch size"
            order = "[b, tokens, size]" if self.batch_first else "[tokens, b, size]"
            remedy = f"Pass tensors {order}, since batch_first={self.batch_first}."
        else:
            return
        fact = f"query {shape_of(query)}, key {shape_of(key)}, value {shape_of(value)}"
        raise InputValueError("MultiheadAttention", "value", f"{condition}, got {fact}", remedy)

    def _check_masks(
        self, padding: Tensor | None, attn_mask: Tensor | None, is_causal: bool, size: tuple[int, int, int]
    ) -> None:
        call, (b, m, n) = "MultiheadAttention", size
        for name, mask, shapes in (
            ("key_padding_mask", padding, [(b, n), (n,)] if b == 1 else [(b, n)]),
            ("attn_mask", attn_mask, [(m, n), (b * self.num_heads, m, n)]),
        ):
            if mask is None:
                continue
            if mask.dtype != torch.bool and not mask.is_floating_point():
                remedy = f"Convert it with {name}.bool(), True = do not attend."
                raise InputTypeError(call, name, f"{name} must be bool or floating-point, got {mask.dtype}", remedy)
            if shape_of(mask) not in shapes:
                condition = f"{name} must have shape {' or '.join(map(str, shapes))}"
                remedy = "Pass attn_mask as [m, n] or [b h, m, n], and key_padding_mask as [b, n]."
                raise InputValueError(call, name, f"{condition}, got shape {shape_of(mask)}", remedy)
        if is_causal and attn_mask is None and m != n:
            problem = (
                f"is_causal needs attn_mask or equally many queries and keys, but there are {m} queries and {n} keys"
            )
            raise InputValueError(call, "is_causal", problem, "Pass the causal mask as attn_mask.")
