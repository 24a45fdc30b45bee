"""Random models of the scale of a trained one: the spectra of its matrices with other singular vectors.

    W' = U S Vᵀ     S: the singular values of W;  U, V: uniformly distributed frames (Haar)

Queries, keys, values and outputs are redrawn head by head, so that each head keeps its norms and spectra. Biases, gains
of norms, embeddings and unembeddings are kept. The whole model changes, and the spectra of single matrices depend on
the basis of queries and keys: these models show what layers of this scale do to tokens. Tests of single heads have
another baseline, ../passes/rotated_heads.py.

Read next: ../propagation/run_propagation.py (which pushes tokens through them), head_weights.py.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from ..._autocast import wide
from ..._errors import InputValueError
from ..._typing import Float, Tensor
from .architecture import Architecture
from .head_weights import HeadWeights


class _Matrices(NamedTuple):
    """A view [k, r, c] of a parameter, one block for each head, and its singular values."""

    view: Float[Tensor, "k r c"]
    spectra: Float[Tensor, "k s"]


class RedrawnModels:
    """Random models with the spectra of the weight matrices of a model.

    The matrices of attention and feed-forward sublayers are redrawn. Layers whose values and queries differ in size,
    and those whose matrices are unknown, are redrawn matrix by matrix instead of head by head.

    Law: tests/laws/test_redrawn_models_keep_the_scale_of_a_model.py.
    """

    def __init__(self, model: nn.Module, architecture: Architecture, weights: Mapping[str, HeadWeights | str]) -> None:
        self._model = copy.deepcopy(model)
        views = _views(self._model, architecture, weights)
        self._matrices = [_Matrices(view, torch.linalg.svdvals(wide(view))) for view in views]

    @torch.no_grad()
    def draw(self, seed: int) -> nn.Module:
        """Return the model with weights drawn by this seed; the next draw changes the same model."""
        generator = torch.Generator().manual_seed(seed)  # on the CPU: the same weights on every device
        for view, S in self._matrices:
            k, r, c = view.shape
            U, V = (_frames(k, n, S.shape[-1], generator, S) for n in (r, c))
            view.copy_((U * S.unsqueeze(-2)) @ V.mT)
        return self._model


def _frames(k: int, n: int, rank: int, generator: torch.Generator, like: Tensor) -> Float[Tensor, "k n rank"]:
    """Return k uniformly distributed orthonormal frames; the signs make the factor of QR unique  [mezzadri07]."""
    Q, R = torch.linalg.qr(torch.randn(k, n, rank, generator=generator).to(like))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def _views(
    model: nn.Module, architecture: Architecture, weights: Mapping[str, HeadWeights | str]
) -> Iterator[Float[Tensor, "k r c"]]:
    """Yield the matrices of all sublayers as views [blocks, r, c] of parameters, each parameter once."""
    rows, columns = _head_sizes(model, architecture, weights)
    names = [*architecture.attention, *(s.name for s in architecture.sublayers)]
    modules = {m: None for name in names for m in model.get_submodule(_module(name)).modules()}
    modules |= {model.get_submodule(home): None for home in architecture.outputs.values()}
    done = _embeddings(model)
    for module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or "bias" in name or id(parameter) in done:
                continue
            if not parameter.is_floating_point():
                problem = f"the weights of {type(module).__name__} are {parameter.dtype} and cannot be redrawn"
                raise InputValueError(
                    "propagate", "baselines", problem, "Load the model in float32, or leave out redrawn."
                )
            done.add(id(parameter))
            parameter.data = parameter.data.contiguous()  # channels_last weights have no view as a matrix
            yield _view(parameter.detach(), module, rows.get(module), columns.get(module))


def _view(W: Tensor, module: nn.Module, rows: int | None, columns: int | None) -> Float[Tensor, "k r c"]:
    """Return a parameter as matrices: blocks of `rows` outputs or of `columns` inputs, one for each head."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return W.flatten(1).unsqueeze(0)
    if W.ndim > 2:  # experts
        return W.flatten(0, -3)
    if type(module).__name__ == "Conv1D":  # GPT-2: [inputs, outputs]
        W = W.mT
    outputs, inputs = W.shape
    if columns is not None and inputs % columns == 0:
        return W.unflatten(1, (-1, columns)).transpose(0, 1)
    return W.unflatten(0, (-1, rows if rows is not None and outputs % rows == 0 else outputs))


def _head_sizes(
    model: nn.Module, architecture: Architecture, weights: Mapping[str, HeadWeights | str]
) -> tuple[dict[nn.Module, int], dict[nn.Module, int]]:
    """Return the outputs of a head in the projections of queries, keys and values, and its inputs in output ones.

    Fused projections of every known layout are made of blocks of this size.
    """
    rows: dict[nn.Module, int] = {}
    columns: dict[nn.Module, int] = {}
    for layer in architecture.attention:
        known = weights.get(layer)
        if not isinstance(known, HeadWeights):
            continue
        d, v = known.query.shape[-1], known.value.shape[-1]
        attention = model.get_submodule(_module(layer))
        if d == v:
            rows |= dict.fromkeys(attention.modules(), d)
        home = architecture.outputs.get(layer)
        if home is None and isinstance(attention, nn.MultiheadAttention):
            columns[attention.out_proj] = v
        elif home is not None:
            columns[model.get_submodule(home)] = v
    return rows, columns


def _embeddings(model: nn.Module) -> set[int]:
    """Return the parameters of embeddings and of the unembedding, which may be one."""
    unembedding = getattr(model, "get_output_embeddings", lambda: None)()
    modules = [m for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) or m is unembedding]
    return {id(p) for m in modules for p in m.parameters()}


def _module(layer: str) -> str:
    return layer.partition("#")[0]
