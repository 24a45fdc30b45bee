"""Weight matrices of each head, measured by running its layer.

    q = z W_q + b_q      z: input of the layer, [D]; likewise keys and values
    u = o W_o + b_o      o: concatenated outputs of the heads

A layer is run on the unit vectors as tokens, at the first position, where rotary embeddings are the identity. The
queries, keys and values it computes are the rows of the matrices. Fused projections, shared heads, low ranks and
different layouts therefore need no special treatment. Norms of queries and keys inside a layer are replaced by their
gains, and `normalized` is set. The matrices are verified on the discovery batch by each token's logit with itself,
which no rotation changes. The angles of rotary embeddings are measured in a window of the length that the model reads.

Read next: rotary.py (rotations of queries and keys), ../predictions/tie.py and ../predictions/qk_geometry.py, which
compare the matrices.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..._typing import Tensor
from ...attention.in_models.intercepted_calls import Call
from ...attention.in_models.interception import LAYERS
from .architecture import Architecture
from .discovery import cut
from .events import Attended, AttentionArguments, Event, LayerCall
from .following import follow
from .head_weights import HeadWeights, Turning
from .hooks import evaluation_mode, without_cache
from .norms import norm_of
from .reprojection import call_on
from .rotary import turning_of

ROUNDING, UNITS = 1e-3, 4.0  # relative tolerance; its minimum in units of eps, which matters in bfloat16


def weights_of(
    model: nn.Module,
    architecture: Architecture,
    inputs: Mapping[str, Any],
    *,
    layers: str = LAYERS,
    only: str | None = None,
) -> dict[str, HeadWeights | str]:
    """Return the weight matrices of every attention layer, or of `only` one, or the reason why they are unknown."""
    events: dict[str, Attended] = {}

    def store(event: Event) -> None:
        if isinstance(event, Attended) and only in (None, event.layer):
            events[event.layer] = event

    with follow(model, architecture, store, statistics="none", layers=layers):
        model(**cut(inputs), **without_cache(model))
    with torch.no_grad(), evaluation_mode(model):
        weights = {layer: _weights(model, architecture, attended, layers) for layer, attended in events.items()}
        rotated = {
            layer: attended.layer_call
            for layer, attended in events.items()
            if isinstance(w := weights[layer], HeadWeights) and w.rotary and attended.layer_call is not None
        }
        for layer, turning in _turnings(model, architecture, inputs, rotated, layers).items():
            weights[layer] = weights[layer]._replace(turning=turning)  # type: ignore[union-attr]
    return weights


def _turnings(
    model: nn.Module, architecture: Architecture, inputs: Mapping[str, Any], small: Mapping[str, LayerCall], layers: str
) -> dict[str, Turning | str]:
    """Return the rotations of each layer, measured in a window of the inputs and verified in the small window."""
    windows: dict[str, LayerCall] = {}

    def store(event: Event) -> None:
        if isinstance(event, Attended) and event.layer in small and event.layer_call is not None:
            windows[event.layer] = event.layer_call

    if small:
        row = {name: t[:1] if isinstance(t, Tensor) and t.ndim else t for name, t in inputs.items()}
        with follow(model, architecture, store, statistics="none", layers=layers):
            model(**row, **without_cache(model))
    return {
        layer: turning_of(call, small[layer], layers=layers, rounding=_rounding(call))
        for layer, call in windows.items()
    }


def _rounding(layer_call: LayerCall) -> float:
    return max(ROUNDING, UNITS * torch.finfo(layer_call.tokens.dtype).eps)


def _weights(model: nn.Module, architecture: Architecture, attended: Attended, layers: str) -> HeadWeights | str:
    layer_call, call = attended.layer_call, attended.call
    if not isinstance(call, AttentionArguments):
        return "it computes its own logits"
    if layer_call is None:
        return "its input tokens are not among its arguments"

    def project(tokens: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [rows, h, d] of tokens at the first position."""
        new = [None if t is None else torch.zeros_like(t) for t in (layer_call.tokens, layer_call.source)]
        for t in new:
            if t is not None:
                t[: len(tokens), 0] = tokens.to(t)
        projected = call_on(layer_call, *new, layers=layers)  # type: ignore[arg-type]
        return tuple(t[: len(tokens), :, 0].double().cpu() for t in projected[:3])  # type: ignore[index]

    with ExitStack() as stack:
        width, rows = layer_call.tokens.shape[-1], len(layer_call.tokens)
        rounding = _rounding(layer_call)
        matrices = _affine(project, width, rows, rounding)
        normalized = matrices is None
        if normalized:
            for module in layer_call.module.modules():
                if (hook := _gain(module, layer_call.tokens)) is not None:
                    stack.callback(module.register_forward_hook(hook).remove)
            matrices = _affine(project, width, rows, rounding)
        if matrices is None:
            return "its queries or keys are not affine functions of its input"
        h = call.query.shape[1]
        (Wq, bq), (Wk, bk), (Wv, bv) = [(_each(W, h), _each(b, h)) for W, b in matrices]
        again = call_on(layer_call, layer_call.tokens, layer_call.source, layers=layers)
    tokens = (layer_call.tokens, layer_call.tokens if layer_call.source is None else layer_call.source)
    rotary = None if again is None else _rotary(again, tokens, (Wq, bq), (Wk, bk), rounding)
    if rotary is None:
        return "its weight matrices do not reproduce its logits"
    sublayer = attended.sublayer
    norm = None if sublayer is None else sublayer.reads or sublayer.norm_of_stream
    home = architecture.outputs.get(attended.layer)
    if home is None and isinstance(layer_call.module, nn.MultiheadAttention):
        home = f"{attended.layer.partition('#')[0]}.out_proj"
    out = shift = None
    if home is not None:
        unit = torch.eye(h * Wv.shape[-1]).to(layer_call.tokens)
        module = model.get_submodule(home)
        origin = module(torch.zeros_like(unit[:1]))
        out, shift = (module(unit) - origin).double().cpu().unflatten(0, (h, -1)), origin[0].double().cpu()
    return HeadWeights(Wq, bq, Wk, bk, Wv, bv, out, norm, rotary, normalized, output_bias=shift)


def _affine(project: Any, width: int, rows: int, rounding: float) -> list[tuple[Tensor, Tensor]] | None:
    """Return the matrices [h, D, d] and biases [h, d] of queries, keys and values; None if they are not affine."""
    origin = [t[0] for t in project(torch.zeros(1, width))]
    unit = torch.eye(width)
    chunks = [project(unit[i : i + rows]) for i in range(0, width, rows)]
    matrices = [torch.cat(parts) - b for parts, b in zip(zip(*chunks, strict=True), origin, strict=True)]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, width, generator=generator)
    for W, b, t in zip(matrices, origin, project(tokens), strict=True):
        expected = torch.einsum("re,ehd->rhd", tokens.double(), W) + b
        if float((t - expected).abs().max()) > rounding * float(expected.abs().max()):
            return None
    return [(W.transpose(0, 1).contiguous(), b) for W, b in zip(matrices, origin, strict=True)]


def _gain(module: nn.Module, like: Tensor) -> Any:
    """Return a hook that replaces a norm of queries or keys by multiplication with its gain; None if it is no norm."""
    sizes = {p.shape[0] for p in module.parameters() if p.ndim == 1}
    if len(sizes) != 1 or any(True for _ in module.children()) or any(p.ndim > 1 for p in module.parameters()):
        return None
    parts = norm_of(module, like.new_zeros(1, sizes.pop()))
    if parts is None:
        return None
    gain = parts[1]

    def hook(m: nn.Module, args: tuple[Any, ...], result: Tensor) -> Tensor:  # noqa: ARG001
        return args[0] * gain.to(args[0])

    return hook


def _each(t: Tensor, h: int) -> Tensor:
    """Repeat the entries of shared heads so that each of h heads has its own."""
    return t.repeat_interleave(h // t.shape[0], 0)


def _rotary(
    call: Call,
    tokens: tuple[Tensor, Tensor],
    query: tuple[Tensor, Tensor],
    key: tuple[Tensor, Tensor],
    rounding: float,
) -> bool | None:
    """Return False if the matrices reproduce queries and keys, True if they do up to a rotation, None otherwise.

    A rotation by the position leaves the logit of a token with itself unchanged.
    """
    q, k = call.query.double().cpu(), call.key.double().cpu()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    expected = [
        torch.einsum("bne,hed->bhnd", t.double().cpu(), W) + b.unsqueeze(1)
        for t, (W, b) in zip(tokens, (query, key), strict=True)
    ]
    errors = [rounding * float(t.norm(dim=-1).max()) for t in (q, k)]
    if all(_near(a, b, error) for a, b, error in zip(expected, (q, k), errors, strict=True)):
        return False
    if tokens[0] is not tokens[1] or q.shape != k.shape:
        return None
    logits = (expected[0] * expected[1]).sum(-1)
    return True if _near(logits, (q * k).sum(-1), errors[0] * errors[1] / rounding) else None


def _near(a: Tensor, b: Tensor, error: float) -> bool:
    return a.shape == b.shape and float((a - b).abs().max()) <= error
