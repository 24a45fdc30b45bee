"""What happens inside a model in one pass: queries, keys and values, and the residual stream about every sublayer.

    captured = capture(model, inputs)
    captured.attention["encoder.layer.3.attention.self"].query       [b, h, n, d]
    captured.sublayers["encoder.layer.3.attention.self"].update      [b, n, D], added to the stream

Read next: following.py (a corpus, of which no event is kept), discovery.py (how the places are found), weights.py (the
matrices of each head).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ...attention.in_models.interception import LAYERS, numbered
from .architecture import Architecture
from .discovery import discover
from .events import Attended, Event, Normed, Passed
from .following import follow
from .hooks import without_cache


class Captured(NamedTuple):
    """One batch inside a model.

    attention: the calls, by layer, in the order of computation; a layer called again is "layer#2".
    sublayers: the residual branches, attention and feed-forward, likewise.
    norms: by the module's name, numbered likewise.
    architecture: how the model is built.
    output: what the model returned.
    """

    attention: dict[str, Attended]
    sublayers: dict[str, Passed]
    norms: dict[str, Normed]
    architecture: Architecture
    output: Any


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    architecture: Architecture | None = None,
    statistics: str = "moments",
    layers: str = LAYERS,
) -> Captured:
    """Everything that happens to one batch inside a model, as plain tensors, without gradients.

    Memory grows with the depth; for a corpus use `follow`.

    Args:
        inputs: the keyword arguments of the model.
        architecture: from `discover`, to spare a second discovery.
        statistics: as in `attend`.

    Law: tests/laws/test_a_captured_model_is_the_model.py.

    >>> import torch, gradlogz
    >>> block = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> found = gradlogz.capture(block, {"src": torch.randn(2, 10, 16)})
    >>> [(name, s.sublayer.placement) for name, s in found.sublayers.items()]
    [('self_attn', 'post'), ('', 'post')]
    """
    found = Captured({}, {}, {}, discover(model, inputs, layers=layers) if architecture is None else architecture, None)

    def keep(event: Event) -> None:
        if isinstance(event, Attended):
            found.attention[event.layer] = event
        elif isinstance(event, Passed):
            found.sublayers[event.sublayer.name] = event
        else:
            found.norms[numbered(event.norm.name, found.norms)] = event

    with follow(model, found.architecture, keep, statistics=statistics, layers=layers):
        output = model(**inputs, **without_cache(model))
    return found._replace(output=output)
