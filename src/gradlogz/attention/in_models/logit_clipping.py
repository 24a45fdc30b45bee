"""QK-clip: bounded attention logits by scaling the projections of queries and keys after an optimizer step.  [kimi25]

    S_h     = max over all rows of the logits of head h, in the passes of the step
    gamma_h = min(1, tau / S_h)
    W_q, W_k of head h are multiplied by sqrt(gamma_h) each

Logits are bilinear in the projections, so that those of head h are multiplied by gamma_h and its largest becomes tau.

Read next: projections.py (which parameters, for grouped, latent, fused and normalised attention).
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..._errors import InputTypeError, InputValueError
from ..._typing import Float, Tensor
from ..result import Attention
from .interception import WRAPPERS, unwrapped
from .monitor_rows import MonitorRow
from .projections import scalings


@torch.no_grad()
def qk_clip(
    model: nn.Module,
    statistics: MonitorRow | Mapping[str, Attention | Float[Tensor, " h"]],
    tau: float = 100.0,
    *,
    projections: str | tuple[str, str] | None = None,
    group: Any = None,
) -> dict[str, Float[Tensor, " h"]]:
    """Multiply the query and key projections of heads with logits above tau so that their largest logit becomes tau.

    Call it after each step of the optimizer, with the statistics of the passes of that step. Heads below tau do not
    change by a bit, unless they share a key head or the gain of a norm with one above it: such heads have the factor of
    the largest logit among them, as in Megatron-LM. Biases are scaled with their rows. Position biases and sinks that
    are added to the logits are not scaled. Nothing waits for the device.

    Args:
        model: the model, or a wrapper of it for distributed training or compilation.
        statistics: a row of `monitor`, the observation of `observe`, or the largest logit of each head by layer.
        tau: 100 in Kimi K2 [kimi25].
        projections: names of the query and key projections in each layer, or of one projection with rows [q; k; v];
            by default the names in models of Hugging Face, torch and this package.
        group: process group over whose ranks the largest logits are taken, in one reduction that all of them must
            call: the processes with the same layers and heads. By default all processes; "local": no others.

    Returns:
        gamma of each layer, [h], 1 for heads that were not clipped.

    Law: tests/laws/test_qk_clip_bounds_logits.py.
    """
    if not isinstance(model, nn.Module):
        remedy = "Pass the model itself."
        raise InputTypeError("qk_clip", "model", f"model must be a torch.nn.Module, got {type(model).__name__}", remedy)
    if not tau > 0.0:
        raise InputValueError("qk_clip", "tau", f"tau must be positive, got {tau}", "Kimi K2 has 100.")
    modules, largest = _modules(model), _largest(statistics)
    distributed = dist.is_available() and dist.is_initialized()
    joined = distributed and isinstance(statistics, MonitorRow) and not modules.keys().isdisjoint(largest)
    unknown = next((layer for layer in largest if layer not in modules), None)
    if unknown is not None and not joined:  # joined rows have the layers of all stages of a pipeline
        problem = f"statistics must have the names of layers of the model, got {unknown!r}"
        raise InputValueError("qk_clip", "statistics", problem, "Pass the model that was monitored or observed.")
    if distributed and group != "local" and largest:
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        packed = torch.cat([each.to(device, torch.float64) for each in largest.values()])
        dist.all_reduce(packed, dist.ReduceOp.MAX, group=group)
        largest = dict(zip(largest, packed.split([len(each) for each in largest.values()]), strict=True))
    factors, parts = {}, []
    for layer, maximum in largest.items():
        if layer not in modules:
            continue
        gamma = torch.where((maximum > tau) & maximum.isfinite(), tau / maximum, torch.ones_like(maximum))
        factors[layer], scaled = scalings(layer, modules[layer], gamma, projections)
        parts += scaled
    for part in parts:  # last, so that a refusal leaves the model unchanged
        part.apply()
    return factors


def _largest(statistics: Any) -> dict[str, Tensor]:
    """Largest logit of each head, by layer; the largest over all calls of a layer that is called several times."""
    if isinstance(statistics, MonitorRow):
        statistics = {layer: heads.max_logit.greatest for layer, heads in statistics.layers.items()}
    largest: dict[str, Tensor] = {}
    for name, value in statistics.items() if isinstance(statistics, Mapping) else [("", None)]:
        if isinstance(value, Attention) and value.max_logit is not None and value.max_logit.ndim > 1:
            value = value.max_logit.detach().transpose(-1, -2).flatten(0, -2).amax(0)
        if not isinstance(value, Tensor) or value.ndim != 1:
            problem = "statistics must have the largest logit of each head, [h], for every layer"
            remedy = "Pass a row of monitor, the result of observe, or a dictionary of tensors."
            raise InputTypeError("qk_clip", "statistics", problem, remedy)
        layer = name.partition("#")[0]
        largest[layer] = torch.maximum(largest[layer], value) if layer in largest else value
    return largest


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by the names that the monitor gives them, without wrappers."""
    return {WRAPPERS.sub("", name).strip("."): module for name, module in unwrapped(model).named_modules()}
