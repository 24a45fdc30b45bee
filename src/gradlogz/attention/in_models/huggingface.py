"""Hugging Face models that compute with `attend`: attn_implementation="gradlogz".

    register()                                                                the name is known to transformers
    AutoModel.from_pretrained(..., attn_implementation="gradlogz")            a model that uses it
    register(model)                                                           one that exists already, all its parts
    unregister(model), unregister()                                           as it was

Masks are registered beside the attention function: an implementation without them gets none, and says nothing.
`observe` needs none of this: it works with whatever implementation a model has.

Read next: intercepted_calls.py (how transformers' arguments are read), observation.py.
"""

import inspect
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..._errors import InputNotImplementedError, InputTypeError, MissingPackageError
from ..._typing import Tensor
from .intercepted_calls import of_interface
from .interception import LAYERS, attention_layers, names_of

NAME = "gradlogz"


def register(model: nn.Module | None = None) -> None:
    """Make attn_implementation="gradlogz" valid in transformers; with a model, set it on every part of that model.

    The outputs are those of the eager implementation to rounding, but for rows that see no key: they are 0 here, and an
    average of hidden values there. Sliding windows, soft caps, sinks, position biases, shared key heads and caches are
    those of the model. Memory for attention is linear in the number of tokens, where the model needs no mask.

    A model with attention layers that do not ask transformers for their attention function is refused, because they
    would go on as before without a word; `observe` sees them too.

    Law: tests/agreement/test_hugging_face_models_compute_the_same.py.
    """
    modeling, masking = _transformers("register")
    modeling.AttentionInterface.register(NAME, attention_function)
    masking.AttentionMaskInterface.register(NAME, masking.sdpa_mask)
    if model is None:
        return
    parts = _parts(model, modeling)
    if not parts:
        remedy = "Use gradlogz.observe, which sees the attention of any module."
        raise InputTypeError(
            "register", "model", f"model must be a transformers model, got {type(model).__name__}", remedy
        )
    outside = tuple(name for name, layer in attention_layers(model, LAYERS) if not _asks(layer))
    if outside:
        condition = "every attention layer must ask transformers for its attention function"
        remedy = "Use gradlogz.observe, which sees what these layers compute by themselves."
        raise InputNotImplementedError(
            "register", "model", f"{condition}, got {names_of(outside)}, which do not", remedy
        )
    before = _before.setdefault(model, {})
    for config in parts:
        if config._attn_implementation != NAME:
            before[id(config)] = (config, config._attn_implementation)
            config._attn_implementation_internal = NAME


def unregister(model: nn.Module | None = None) -> None:
    """Give a model back the implementation that it had before `register`; without one, all of them, and the name."""
    modeling, masking = _transformers("unregister")
    for each in list(_before) if model is None else [model]:
        for config, implementation in _before.pop(each, {}).values():
            config._attn_implementation_internal = implementation
    if model is None:
        modeling.AttentionInterface._global_mapping.pop(NAME, None)
        masking.AttentionMaskInterface._global_mapping.pop(NAME, None)


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """The attention function of transformers: (output [b, m, h, v], no weights)."""
    call = of_interface(NAME, module, query, key, value, attention_mask, **kwargs)
    return call.attend("none").output.transpose(1, 2).contiguous(), None


_before: WeakKeyDictionary[nn.Module, dict[int, tuple[Any, str]]] = WeakKeyDictionary()


def _parts(model: nn.Module, modeling: Any) -> list[Any]:
    """The configurations of all models inside a model: transformers' own setter forgets some of them (T5's halves)."""
    configs = [part.config for part in model.modules() if isinstance(part, modeling.PreTrainedModel)]
    return list({id(config): config for config in configs}.values())


def _asks(layer: nn.Module) -> bool:
    """Whether a layer asks transformers for its attention function, by its source."""
    try:
        return any("get_interface(" in inspect.getsource(each) for each in type(layer).__mro__[:-1])
    except (OSError, TypeError):  # a class without source
        return False


def _transformers(call: str) -> tuple[Any, Any]:
    try:
        return import_module("transformers.modeling_utils"), import_module("transformers.masking_utils")
    except ImportError:
        remedy = "Install it: pip install 'gradlogz[probe]'."
        raise MissingPackageError(call, "transformers", "transformers must be installed, got none", remedy) from None
