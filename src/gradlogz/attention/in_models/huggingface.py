"""Hugging Face models that compute with `attend`: attn_implementation="gradlogz".

    register()                                                                add the name to transformers
    AutoModel.from_pretrained(..., attn_implementation="gradlogz")            load a model that uses it
    register(model)                                                           set it on a loaded model, all its parts
    unregister(model), unregister()                                           undo

A mask function is registered too: transformers silently passes no mask to an implementation without one.
`observe` does not need registration: it works with every attention implementation.

Read next: intercepted_calls.py (the arguments of transformers), observation.py.
"""

import inspect
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..._errors import InputNotImplementedError, InputTypeError, MissingPackageError
from ..._typing import Tensor
from ...kernels.attention.dispatch import statistics_are_free
from .intercepted_calls import NAME, call_from_interface
from .interception import LAYERS, attention_layers, names_of


def register(model: nn.Module | None = None) -> None:
    """Make attn_implementation="gradlogz" valid in transformers; with a model, set it on every part of that model.

    Outputs equal those of the eager implementation to rounding, except for rows that see no key: they are 0 here, an
    average of hidden values there. Sliding windows, soft caps, sinks, position biases, shared key heads and caches are
    supported. Memory for attention is linear in the number of tokens, if the model needs no mask. `monitor` reads the
    statistics of such a model from the pass that is made anyway.

    Raises for a model with attention layers that do not get their attention function from transformers, since they
    would silently keep their own; `observe` supports such layers.

    Law: tests/agreement/test_hugging_face_models_compute_the_same.py.
    """
    modeling, masking = _transformers("register")
    modeling.AttentionInterface.register(NAME, attention_function)
    masking.AttentionMaskInterface.register(NAME, masking.sdpa_mask)
    if model is None:
        return
    parts = _configurations(model, modeling)
    if not parts:
        remedy = "Use gradlogz.observe, which supports any module."
        raise InputTypeError(
            "register", "model", f"model must be a transformers model, got {type(model).__name__}", remedy
        )
    outside = tuple(name for name, layer in attention_layers(model, LAYERS) if not _uses_interface(layer))
    if outside:
        problem = f"model has attention layers that do not use transformers' attention interface: {names_of(outside)}"
        remedy = "Use gradlogz.observe, which supports such layers."
        raise InputNotImplementedError("register", "model", problem, remedy)
    before = _previous.setdefault(model, {})
    for config in parts:
        if config._attn_implementation != NAME:
            before[id(config)] = (config, config._attn_implementation)
            config._attn_implementation_internal = NAME


def unregister(model: nn.Module | None = None) -> None:
    """Restore the implementation that a model had before `register`; without a model, of all, and remove the name."""
    modeling, masking = _transformers("unregister")
    for each in list(_previous) if model is None else [model]:
        for config, implementation in _previous.pop(each, {}).values():
            config._attn_implementation_internal = implementation
    if model is None:
        modeling.AttentionInterface._global_mapping.pop(NAME, None)
        masking.AttentionMaskInterface._global_mapping.pop(NAME, None)


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers: returns (output [b, m, h, v], None for the weights).

    It requests the statistics where they are free, so that `monitor` reads them without a second pass.
    """
    call = call_from_interface(NAME, module, query, key, value, attention_mask, **kwargs)
    free = statistics_are_free(call.query, call.key, dropout=call.options["dropout_p"] > 0)
    return call.attend("scalar" if free else "none").output.transpose(1, 2).contiguous(), None


_previous: WeakKeyDictionary[nn.Module, dict[int, tuple[Any, str]]] = WeakKeyDictionary()


def _configurations(model: nn.Module, modeling: Any) -> list[Any]:
    """Configurations of all models inside a model; transformers' own setter omits some, as those of T5's halves."""
    configs = [part.config for part in model.modules() if isinstance(part, modeling.PreTrainedModel)]
    return list({id(config): config for config in configs}.values())


def _uses_interface(layer: nn.Module) -> bool:
    """Return whether a layer gets its attention function from transformers, judged by its source."""
    try:
        return any("get_interface(" in inspect.getsource(each) for each in type(layer).__mro__[:-1])
    except (OSError, TypeError):  # a class without source
        return False


def _transformers(call: str) -> tuple[Any, Any]:
    try:
        return import_module("transformers.modeling_utils"), import_module("transformers.masking_utils")
    except ImportError:
        remedy = "Install it with pip install 'gradlogz[probe]'."
        raise MissingPackageError(call, "transformers", "transformers is not installed", remedy) from None
