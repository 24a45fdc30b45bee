"""Nested statistics: merged as wholes, written as flat tensors with a plan of how they belong together.

    state      = None | a statistic | a constant | {name: state}
    merge      statistic by statistic; None is neutral, names of one side only are kept, constants must be equal; what
               is the same statistic at two places on both sides is one of the result too, and takes no memory twice
    to_tensors names joined by "/" ; of symmetric matrices only the upper triangle

Read next: sums.py, comoments.py, histogram.py, sample.py.
"""

from typing import Any

import torch

from ..._errors import InputTypeError, InputValueError, sentence, shape_of
from ..._typing import Tensor
from .comoments import Comoments, Moments
from .histogram import Histogram
from .sample import Sample
from .sums import Sums

_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (Sums, Comoments, Moments, Histogram, Sample)}
_CONSTANTS = (str, int, float, Tensor)


def merge(one: Any, other: Any) -> Any:
    """The state of both, as if one pass had seen all; associative and commutative up to rounding."""
    return _merged(one, other, {})


def _merged(one: Any, other: Any, known: dict[tuple[int, int], Any]) -> Any:
    if one is None or other is None:
        return other if one is None else one
    if isinstance(one, dict) and isinstance(other, dict):
        return {name: _merged(one.get(name), other.get(name), known) for name in {**one, **other}}
    if type(one) is not type(other) or not (type(one).__name__ in _KINDS or isinstance(one, _CONSTANTS)):
        fact = f"{type(one).__name__} and {type(other).__name__}"
        remedy = "Statistics, constants and dictionaries of them merge."
        raise InputTypeError(sentence("merge", "both must be states of one kind", fact, remedy))
    if type(one).__name__ in _KINDS:
        pair = (id(one), id(other))
        if pair not in known:
            known[pair] = one.merge(other)
        return known[pair]
    if not (torch.equal(one, other) if isinstance(one, Tensor) else one == other):
        fact = "two tensors that differ" if isinstance(one, Tensor) else f"{one!r} and {other!r}"
        remedy = "Only statistics of runs with the same settings merge."
        raise InputValueError(sentence("merge", "constants must be equal", fact, remedy))
    return one


def to_tensors(state: Any) -> tuple[dict[str, Tensor], Any]:
    """A state as named tensors on the CPU, and its layout, made of what JSON knows; from_tensors turns them back."""
    tensors: dict[str, Tensor] = {}
    layout = _written(state, "", tensors)
    met: set[int] = set()
    for name, t in tensors.items():  # a file holds every tensor by itself, also those that share their memory
        if t.data_ptr() in met:
            tensors[name] = t.clone()
        met.add(t.data_ptr())
    return tensors, layout


def from_tensors(tensors: dict[str, Tensor], layout: Any) -> Any:
    """The state that to_tensors wrote, equal to the last bit."""
    kind = layout.get("kind") if isinstance(layout, dict) else None
    if kind == "constant":
        return layout["value"]
    if kind in ("dict", "tuple", *_KINDS):
        parts = {name: from_tensors(tensors, part) for name, part in layout["parts"].items()}
        return parts if kind == "dict" else tuple(parts.values()) if kind == "tuple" else _KINDS[kind](**parts)
    if kind not in ("tensor", "symmetric"):
        remedy = "It was written by another version, or damaged."
        raise InputValueError(sentence("from_tensors", "layout must be that of to_tensors", f"kind {kind!r}", remedy))
    if layout["name"] not in tensors or shape_of(tensors[layout["name"]]) != tuple(layout["shape"]):
        found = tensors.get(layout["name"])
        condition = f"tensors must hold {layout['name']} of shape {tuple(layout['shape'])}"
        fact = "no such name" if found is None else f"shape {shape_of(found)}"
        raise InputValueError(sentence("from_tensors", condition, fact, "Read the tensors that belong to this layout."))
    tensor = tensors[layout["name"]]
    if kind == "tensor":
        return tensor
    rows, columns = torch.triu_indices(layout["side"], layout["side"])
    whole = tensor.new_empty(*tensor.shape[:-1], layout["side"], layout["side"])
    whole[..., rows, columns] = tensor
    whole[..., columns, rows] = tensor
    return whole


def _written(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Adds the tensors of a state under a name and returns its layout."""
    if isinstance(state, Tensor):
        return _written_tensor(state.detach().cpu(), name, tensors)
    if state is None or isinstance(state, (str, int, float)):
        return {"kind": "constant", "value": state}
    named = isinstance(state, tuple(_KINDS.values()))
    if isinstance(state, dict) and all(isinstance(key, str) for key in state):
        kind, parts = "dict", state
    elif named or type(state) is tuple:
        kind = type(state).__name__
        parts = state._asdict() if named else {str(place): part for place, part in enumerate(state)}
    else:
        remedy = "Dictionaries with names as keys, statistics, tensors, numbers and strings are."
        raise InputTypeError(sentence("to_tensors", "state must be made of statistics", type(state).__name__, remedy))
    # Names of files and layers may hold "/" themselves: written as JSON pointers do, no two states share a name.
    paths = {key: f"{name}/{key.replace('~', '~0').replace('/', '~1')}".removeprefix("/") for key in parts}
    return {"kind": kind, "parts": {key: _written(part, paths[key], tensors) for key, part in parts.items()}}


def _written_tensor(tensor: Tensor, name: str, tensors: dict[str, Tensor]) -> Any:
    layout: dict[str, Any] = {"kind": "tensor", "name": name}
    if tensor.ndim > 1 and 1 < tensor.shape[-1] == tensor.shape[-2] and torch.equal(tensor, tensor.mT):
        layout = {"kind": "symmetric", "name": name, "side": tensor.shape[-1]}
        rows, columns = torch.triu_indices(tensor.shape[-1], tensor.shape[-1])
        tensor = tensor[..., rows, columns]
    tensors[name] = tensor.contiguous()
    return {**layout, "shape": list(tensor.shape)}
