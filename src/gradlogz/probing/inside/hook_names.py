"""Captured tensors under their names in TransformerLens, in its layout.

    blocks.L.attn.hook_q, hook_k, hook_v      [b, n, h, d]    attention[layer].query, key, value
    blocks.L.attn.hook_rot_q, hook_rot_k      [b, n, h, d]    the same after a rotary embedding; hook_q is before it
    blocks.L.attn.hook_z                      [b, n, h, v]    attention[layer].attention.output
    blocks.L.attn.hook_pattern                [b, h, m, n]    weights; computed on request, since they are n x n
    blocks.L.hook_resid_pre                   [b, n, D]       sublayers[layer].stream
    blocks.L.hook_attn_out                    [b, n, D]       sublayers[layer].update
    blocks.L.hook_resid_mid                   [b, n, D]       sublayers[layer].after; none if branches are parallel
    blocks.L.mlp.hook_pre, hook_post          [b, n, H]       hidden units before and after the activation function;
    blocks.L.mlp.hook_pre_linear              [b, n, H]       in gated maps hook_pre is the gate, hook_pre_linear the
                                                              other factor and hook_post their product
    blocks.L.hook_mlp_out                     [b, n, D]       sublayers[feed_forward].update
    blocks.L.hook_resid_post                  [b, n, D]       sublayers[feed_forward].after

L is the number in the names of the layers, or their order where a number is missing or repeated, as in ALBERT. Where
a model normalises queries and keys, hook_q and hook_k are after that norm, in TransformerLens before it.

Read next: capturing.py (the records), reprojection.py (queries before a rotation).
"""

from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch

from ..._errors import InputValueError
from ..._typing import Float, Tensor
from ...attention.in_models.block_numbers import block_numbers
from ...attention.in_models.intercepted_calls import Call
from .events import Attended, AttentionArguments, Passed
from .reprojection import at_tokens, call_on


class TensorName(NamedTuple):
    """Name of a captured tensor: its dictionary in `Captured`, its key there, and a field of the record.

    The fields unrotated_query, unrotated_key, pattern and output are computed from the record, as are hidden_pre,
    hidden_linear and hidden_post of feed-forward maps.
    """

    record: Literal["attention", "sublayers"]
    layer: str
    field: str


class HookedTensors(Mapping[str, Tensor]):
    """Captured tensors by their names in TransformerLens; `names` maps each to the name of the record and field.

    Tensors are views of the records. Unrotated queries and keys, attention weights and hidden units are computed at
    each access.
    """

    def __init__(self, attention: Mapping[str, Attended], sublayers: Mapping[str, Passed], *, pattern: bool) -> None:
        self._attention, self._sublayers = attention, sublayers
        self.names = _names(attention, sublayers, pattern=pattern)

    def __getitem__(self, name: str) -> Tensor:
        record, layer, field = self.names[name]
        if record == "sublayers":
            passed = self._sublayers[layer]
            tensor: Tensor = _hidden(passed, field) if field.startswith("hidden") else getattr(passed, field)
            return tensor
        attended = self._attention[layer]
        if field == "pattern":
            return _pattern(attended)
        if field == "output":
            return attended.attention.output.transpose(1, 2)
        if field.startswith("unrotated"):
            turned = _unrotated(attended)
            assert turned is not None  # else the name would not exist
            return turned[field == "unrotated_key"].transpose(1, 2)
        operand: Tensor = getattr(attended, field)
        return operand.transpose(1, 2)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"HookedTensors({len(self)} tensors)"


def _names(
    attention: Mapping[str, Attended], sublayers: Mapping[str, Passed], *, pattern: bool
) -> dict[str, TensorName]:
    if any(attended.crosses for attended in attention.values()):
        problem = "the model has cross-attention, and names of the form blocks.L are those of a single stack of layers"
        raise InputValueError("Captured.hooks", "model", problem, "Use `attention` and `sublayers`, by layer name.")
    blocks = dict(zip(attention, block_numbers(list(attention)), strict=True))
    forward = [name for name, passed in sublayers.items() if passed.sublayer.kind == "feed_forward"]
    numbers = block_numbers(forward)
    after = dict(zip(numbers, forward, strict=True)) if set(numbers) <= set(blocks.values()) else {}
    names: dict[str, TensorName] = {}
    for layer, block in blocks.items():
        for hook, field in _operands(attention[layer], pattern=pattern).items():
            names[f"blocks.{block}.attn.{hook}"] = TensorName("attention", layer, field)
        if layer not in sublayers:
            continue
        last = after.get(block, layer)
        parallel = last != layer and sublayers[last].sublayer.sum == sublayers[layer].sublayer.sum
        places = {"hook_resid_pre": (layer, "stream"), "hook_attn_out": (layer, "update")}
        places |= {} if parallel or last == layer else {"hook_resid_mid": (layer, "after")}
        places |= {} if last == layer else {"hook_mlp_out": (last, "update")}
        if last != layer and (hidden := sublayers[last].map) is not None:
            places |= {"mlp.hook_pre": (last, "hidden_pre"), "mlp.hook_post": (last, "hidden_post")}
            places |= {} if hidden.form.gate is None else {"mlp.hook_pre_linear": (last, "hidden_linear")}
        places["hook_resid_post"] = (last, "after")
        names |= {f"blocks.{block}.{hook}": TensorName("sublayers", *place) for hook, place in places.items()}
    return names


def _operands(attended: Attended, *, pattern: bool) -> dict[str, str]:
    """Return the hooks of an attention call, with the fields that they name."""
    weights = {"hook_pattern": "pattern"} if pattern else {}
    if not isinstance(attended.call, AttentionArguments):
        return weights  # the layer computes its own logits
    hooks = {"hook_v": "value", "hook_z": "output", **weights}
    unrotated = _unrotated(attended)
    if unrotated is None:
        return hooks  # it is unknown whether a rotary embedding was applied
    if torch.equal(unrotated[0], attended.query) and torch.equal(unrotated[1], attended.key):
        return {"hook_q": "query", "hook_k": "key", **hooks}
    return {
        "hook_q": "unrotated_query", "hook_k": "unrotated_key", "hook_rot_q": "query", "hook_rot_k": "key", **hooks,
    }  # fmt: skip


@torch.no_grad()
def _hidden(passed: Passed, field: str) -> Float[Tensor, "b n H"]:
    """Return the hidden units of a feed-forward map: pre, linear (of gated maps) or post."""
    hidden = passed.map
    assert hidden is not None  # else the name would not exist
    first, gate = hidden.form.first, hidden.form.gate
    if field == "hidden_linear":
        return hidden.read(first, passed.input)
    before = hidden.read(gate or first, passed.input)
    if field == "hidden_pre":
        return before
    after = hidden.activation(before)
    return after if gate is None else after * hidden.read(first, passed.input)


@torch.no_grad()
def _unrotated(attended: Attended) -> tuple[Tensor, Tensor] | None:
    """Return queries and keys as if all tokens were at the first position, where a rotary embedding is the identity.

    None if the layer cannot be run on tokens at other positions.
    """
    layer_call = attended.layer_call
    if layer_call is None or not layer_call.parted:
        return None
    first = torch.zeros(layer_call.tokens.shape[:2], dtype=torch.int64, device=layer_call.tokens.device)
    call = call_on(at_tokens(layer_call, first), layer_call.tokens)
    return None if call is None else (call.query, call.key)


def _pattern(attended: Attended) -> Float[Tensor, "b h m n"]:
    if isinstance(attended.call, AttentionArguments):
        query, key, value, *_ = attended.call
        options = {name: option for name, option in attended.call._asdict().items() if option is not None}
        return Call(
            query, key, value, {n: o for n, o in options.items() if n not in ("query", "key", "value")}
        ).weights()
    return attended.call.softmax(-1)
