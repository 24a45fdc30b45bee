"""Capture of the internal tensors of one pass: queries, keys and values, and the residual stream at every sublayer.

    captured = capture(model, inputs)
    captured.attention["encoder.layer.3.attention.self"].query       [b, h, n, d]
    captured.sublayers["encoder.layer.3.attention.self"].update      [b, n, D], added to the stream
    captured.hooks()["blocks.3.attn.hook_q"]                         [b, n, h, d], by its name in TransformerLens

Read next: hook_names.py (those names), following.py (the same events for a corpus, without storing them), discovery.py
(the sites), weights.py (the matrices of each head).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from ...attention.in_models.interception import LAYERS, numbered
from .architecture import Architecture
from .discovery import discover
from .events import Attended, Event, Normed, Passed
from .following import follow
from .hook_names import HookedTensors
from .hooks import without_cache


class Captured(NamedTuple):
    """Internal tensors of a model for one batch.

    attention: attention calls by layer name, in the order of computation; the second call of a layer is "layer#2".
    sublayers: residual branches, attention and feed-forward, named and ordered likewise.
    norms: norms of the residual stream by module name, numbered likewise.
    architecture: architecture of the model.
    output: output of the model.
    """

    attention: dict[str, Attended]
    sublayers: dict[str, Passed]
    norms: dict[str, Normed]
    architecture: Architecture
    output: Any

    def hooks(self, *, pattern: bool = False) -> HookedTensors:
        """Return the tensors under their names in TransformerLens, such as blocks.0.attn.hook_q, in its layout.

        pattern: include the attention weights, blocks.L.attn.hook_pattern, n x n for each head.

        Law: tests/agreement/test_hook_names_are_those_of_transformerlens.py.
        """
        return HookedTensors(self.attention, self.sublayers, pattern=pattern)


def capture(
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    architecture: Architecture | None = None,
    statistics: str = "moments",
    layers: str = LAYERS,
) -> Captured:
    """Run a model on one batch and return its attention calls, residual branches and norms, without gradients.

    Memory grows with the depth of the model; for a corpus use `follow`.

    Args:
        inputs: keyword arguments of the model.
        architecture: result of `discover`; computed if None.
        statistics: as in `attend`.

    Law: tests/laws/test_a_captured_model_is_the_model.py.

    >>> import torch, gradlogz
    >>> block = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
    >>> captured = gradlogz.capture(block, {"src": torch.randn(2, 10, 16)})
    >>> [(name, s.sublayer.placement) for name, s in captured.sublayers.items()]
    [('self_attn', 'post'), ('', 'post')]
    """
    architecture = discover(model, inputs, layers=layers) if architecture is None else architecture
    captured = Captured({}, {}, {}, architecture, None)

    def store(event: Event) -> None:
        if isinstance(event, Attended):
            captured.attention[event.layer] = event
        elif isinstance(event, Passed):
            captured.sublayers[event.sublayer.name] = event
        else:
            captured.norms[numbered(event.norm.name, captured.norms)] = event

    with follow(model, architecture, store, statistics=statistics, layers=layers):
        output = model(**inputs, **without_cache(model))
    return captured._replace(output=output)
