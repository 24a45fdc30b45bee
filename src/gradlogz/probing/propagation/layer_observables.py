"""Observables of the tokens between the layers of a model: those of the simulator (../../dynamics/observables.py).

    cloud       the tokens that a layer reads: the stream of a post-norm model; in a pre-norm model the stream after the
                norm, without gain and bias, which differ from layer to layer
    step        stream before the layer, after attention is added (in a model with parallel sublayers, after both are),
                and after the layer
    attention   entropy and self-weight, mean over heads

Layers have different QK matrices, so that the pair energy of the simulator is defined for each layer alone; it is
recorded where one layer is repeated (layer_iteration.py).

Read next: layer_passes.py (records the tokens), run_propagation.py.
"""

from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ...dynamics.contraction import LayerNorm, moments_of
from ...dynamics.observables import OBSERVABLES, AttentionRecord, CloudStep
from ..inside.architecture import Sublayer

CLOUD = ("radius", "mean_fraction", "clusters", "within")
CENTRED = ("effective_rank", "kurtosis", "sliced_wasserstein")  # functions of the cloud without its mean
STEP = ("displacement", "expansion", "contraction")
ATTENTION = ("entropy", "self_weight")
OBSERVED = (*CLOUD, *CENTRED, *STEP, *ATTENTION)
NOISE = 16.0  # variance of a direction that counts, at least, in units of the square of rounding


class LayerTokens(NamedTuple):
    """Tokens where a layer begins: the stream, the stream after its attention, and statistics of its attention.

    The last three are None after the last layer. Entropies and self-weights are means over heads.
    """

    stream: Float[Tensor, "n D"]
    ascended: Float[Tensor, "n D"] | None = None
    entropy: Float[Tensor, " n"] | None = None
    self_weight: Float[Tensor, " n"] | None = None


def observables_of(depths: list[LayerTokens], layers: list[Sublayer]) -> dict[str, Float[Tensor, " depths"]]:
    """Return each observable at every depth, NaN where it is not defined."""
    columns: dict[str, list[float]] = {name: [] for name in OBSERVED}
    previous: LayerTokens | None = None
    record = AttentionRecord(torch.zeros(1, 1), None, None)
    for number, depth in enumerate(depths):
        x = depth.stream.double()
        cloud = read_tokens(x, layers[min(number, len(layers) - 1)])
        step = None
        if previous is not None and previous.ascended is not None:
            step = CloudStep(previous.stream.double(), previous.ascended.double(), x)
        inside = in_range(cloud, torch.finfo(depth.stream.dtype).eps)
        for name in (*CLOUD, *CENTRED):
            columns[name].append(float(OBSERVABLES[name](inside if name in CENTRED else cloud, record, None)))
        for name in STEP:  # of the stream: the norms of a pre-norm model leave it unchanged
            columns[name].append(float(OBSERVABLES[name](x, record, step)))
        for name, values in zip(ATTENTION, (depth.entropy, depth.self_weight), strict=True):
            columns[name].append(torch.nan if values is None else float(values.double().mean()))
        previous = depth
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()}


def read_tokens(stream: Float[Tensor, "n D"], layer: Sublayer) -> Float[Tensor, "n D"]:
    """Return the tokens that a layer reads, without the gain and bias of its norm."""
    if layer.reads is None:
        return stream
    return LayerNorm(centres=layer.reads.centres)(stream)


def in_range(cloud: Float[Tensor, "n D"], eps: float) -> Float[Tensor, "n r"]:
    """Return the centred tokens in an orthonormal basis of the directions that they vary in, beyond rounding.

    A norm that centres leaves one direction without variance, factored embeddings and repeated tokens leave more;
    whitening would enlarge their rounding errors.
    """
    mean, covariance = moments_of(cloud)
    values, vectors = torch.linalg.eigh(covariance)
    least = NOISE * eps**2 * cloud.square().sum(-1).mean()
    return (cloud - mean) @ vectors[:, values > least]
