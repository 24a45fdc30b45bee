"""Random models of the architecture of a given one: freshly initialised, or with the scale of its trained weights.

    with_random_weights   every weight as before training
    MatchedModels         W' = U S Vᵀ: the singular values S of W, singular vectors U and V redrawn (uniform, Haar)
                          or W' = a random permutation of the entries of W

Queries, keys, values and outputs are redrawn head by head, so that each head keeps its norms and spectra. Biases, gains
of norms, embeddings and unembeddings are kept. A model that differs from its matched models has learned more than a
scale; one that differs from its fresh initialisation need not have.

Read next: ../run_probe.py (measures them), ../hypothesis_tests.py (their band), head_weights.py.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

import torch
from torch import nn

from ..._errors import InputValueError
from ..._typing import Float, Tensor
from .architecture import Architecture
from .head_weights import HeadWeights

Kept = Literal["spectra", "entries"]


def with_random_weights(model: nn.Module, *, seed: int) -> nn.Module:
    """Return the random-weights baseline: a model of the same architecture with freshly initialised weights.

    A Hugging Face model is initialised as before training, any other by the `reset_parameters` of its modules. The
    state of torch's random number generators is preserved.
    """
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        baseline = _initialised(model)
    for parameter, fresh in zip(model.parameters(), baseline.parameters(), strict=True):
        fresh.requires_grad_(parameter.requires_grad)
    return baseline.train(model.training)


def _initialised(model: nn.Module) -> nn.Module:
    first = next(model.parameters())
    if hasattr(model, "config") and hasattr(model, "base_model_prefix"):
        bare = {"add_pooling_layer": False} if getattr(model, "pooler", nn.Module) is None else {}
        return type(model)(copy.deepcopy(model.config), **bare).to(first.device, first.dtype)
    baseline = copy.deepcopy(model)
    for name, module in baseline.named_modules():
        if callable(getattr(module, "reset_parameters", None)):
            module.reset_parameters()
        elif callable(getattr(module, "_reset_parameters", None)):  # torch's MultiheadAttention and Transformer
            module._reset_parameters()
        elif next(module.parameters(recurse=False), None) is not None:
            problem = f"{name or 'the model'} ({type(module).__name__}) has parameters but no method reset_parameters"
            raise InputValueError("with_random_weights", "model", problem, "Define that method.")
    return baseline


class _Matrices(NamedTuple):
    """A view [k, r, c] of a parameter, one block for each head, and its invariants: singular values or entries."""

    view: Float[Tensor, "k r c"]
    invariants: Float[Tensor, "k ..."]


class MatchedModels:
    """Random models with the spectra, or the entries, of the weight matrices of a model.

    The matrices of attention and feed-forward sublayers are redrawn. Layers whose values and queries differ in size,
    and those whose matrices are unknown, are redrawn matrix by matrix instead of head by head.

    Law: tests/laws/test_matched_models_keep_the_scale_of_a_model.py.
    """

    def __init__(
        self,
        model: nn.Module,
        architecture: Architecture,
        weights: Mapping[str, HeadWeights | str],
        *,
        keep: Kept = "spectra",
    ) -> None:
        self._model, self._keep = copy.deepcopy(model), keep
        self._matrices = [
            _Matrices(view, torch.linalg.svdvals(_wide(view)) if keep == "spectra" else view.clone())
            for view in _views(self._model, architecture, weights)
        ]

    @torch.no_grad()
    def draw(self, seed: int) -> nn.Module:
        """Return the model with weights drawn by this seed; the next draw changes the same model."""
        generator = torch.Generator().manual_seed(seed)  # on the CPU: the same weights on every device
        for view, invariants in self._matrices:
            k, r, c = view.shape
            if self._keep == "entries":
                order = torch.rand(k, r * c, generator=generator).argsort(-1).to(view.device)
                view.copy_(invariants.flatten(1).gather(1, order).view_as(view))
            else:
                S = invariants
                U, V = (_frames(k, n, S.shape[-1], generator, S) for n in (r, c))
                view.copy_((U * S.unsqueeze(-2)) @ V.mT)
        return self._model


def _frames(k: int, n: int, rank: int, generator: torch.Generator, like: Tensor) -> Float[Tensor, "k n rank"]:
    """Return k uniformly distributed orthonormal frames; the signs make the factor of QR unique  [mezzadri07]."""
    Q, R = torch.linalg.qr(torch.randn(k, n, rank, generator=generator).to(like))
    return Q * R.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def _wide(t: Tensor) -> Tensor:
    """Return a tensor in float32 at least, which linear algebra needs."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


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
                raise InputValueError("probe", "draws", problem, "Load the model in float32, or pass draws=0.")
            done.add(id(parameter))
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
