"""Hugging Face models that compute with `attend`: attn_implementation="gradlogz".

    register()                                                                add the name to transformers
    AutoModel.from_pretrained(..., attn_implementation="gradlogz")            load a model that uses it
    register(model)                                                           set it on a loaded model, all its parts
    with collect() as results: model(...)                                     statistics of each layer, also compiled
    unregister(model), unregister()                                           undo

A mask function is registered too: transformers silently passes no mask to an implementation without one. Where the
causal flag of the layers replaces a mask, transformers omits it; in architectures without support for SDPA the flags
may be wrong, since the eager implementation ignores them, and there no mask is omitted.
`observe` does not need registration: it works with every attention implementation.

Read next: intercepted_calls.py (the arguments of transformers), observation.py.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ..._errors import InputNotImplementedError, InputTypeError, MissingPackageError
from ..._typing import Tensor
from ..result import Attention
from .checkpointed_results import refusing_gradients
from .collections_of_results import collections
from .hooks import in_backward
from .intercepted_calls import NAME, call_from_interface
from .interception import LAYERS, attention_layers, named, names_of


def register(model: nn.Module | None = None, *, layers: str = LAYERS, strict: bool = True) -> None:
    """Make attn_implementation="gradlogz" valid in transformers; with a model, set it on every part of that model.

    Outputs equal those of the eager implementation to rounding, except for rows that see no key: they are 0 here, an
    average of hidden values there. Sliding windows, soft caps, sinks, position biases, selected keys, shared key heads
    and caches are supported. Memory for attention is linear in the number of tokens, if the model needs no mask.
    `monitor` reads the statistics of such a model from the pass that is made anyway.

    Args:
        model: a model whose layers get their attention function from transformers. Other layers would silently keep
            their own attention; `observe` supports those that call softmax.
        layers: regular expression for class names of attention layers, which are checked.
        strict: raise for attention layers that would keep their own attention, such as the linear ones of a hybrid.
            With False, submodels with layers that call softmax themselves keep their implementation, and its masks.

    Law: tests/agreement/test_hugging_face_models_compute_the_same.py,
        tests/agreement/test_registered_models_stay_causal.py.
    """
    modeling, masking = _transformers("register")
    modeling.AttentionInterface.register(NAME, attention_function)
    masking.AttentionMaskInterface.register(NAME, mask_function)
    if model is None:
        return
    parts = _configurations(model, modeling)
    if not parts:
        remedy = "Use gradlogz.observe, which supports any module."
        raise InputTypeError(
            "register", "model", f"model must be a transformers model, got {type(model).__name__}", remedy
        )
    expected = attention_layers(model, layers)
    outside = tuple(named(name, layer) for name, layer in expected if not _mentions("get_interface(", layer))
    settable = [config for config in parts if id(config) not in _needing_their_masks(model, modeling)]
    if outside and (strict or not settable or len(outside) == len(expected)):
        problem = f"model has attention layers that do not use transformers' attention interface: {names_of(outside)}"
        remedy = "Pass strict=False to let them keep their own attention, or layers= with a pattern that excludes them."
        if not settable or len(outside) == len(expected):
            remedy = "Use gradlogz.observe, which supports layers that call softmax."
        raise InputNotImplementedError("register", "model", problem, remedy)
    before = _previous.setdefault(model, {})
    for config in settable:
        _examine_flags(config)  # not possible while a graph is compiled
        if config._attn_implementation != NAME:
            before[id(config)] = (config, config._attn_implementation)
            config._attn_implementation_internal = NAME


def unregister(model: nn.Module | None = None) -> None:
    """Restore the implementation that a model had before `register`; without a model, that of all models.

    The name stays valid, since models that were copied or loaded with it may still run.
    """
    _transformers("unregister")
    for each in list(_previous) if model is None else [model]:
        for config, implementation in _previous.pop(each, {}).values():
            config._attn_implementation_internal = implementation


def attention_function(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attention function for transformers: returns (output [b, m, h, v], None for the weights).

    It computes the statistics, so that `monitor` and `collect` read them without a second pass.
    """
    call = call_from_interface(NAME, module, query, key, value, attention_mask, **kwargs)
    result = call.attend("scalar")
    recomputed = not torch.compiler.is_compiling() and in_backward()  # a checkpoint: collected before
    for results, differentiable in () if recomputed else collections:
        lost = differentiable and not torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
        results.append(refusing_gradients(result) if lost else result)
    return result.output.transpose(1, 2).contiguous(), None


@contextmanager
def collect() -> Iterator[list[Attention]]:
    """Context in which the results of registered layers are collected, in the order of computation; also compiled.

    `observe` runs compiled models uncompiled; this does not. Enter it around the call of the model, inside or outside
    of the compiled function. The statistics are part of the graph and have gradients.

    Law: tests/compile/test_statistics_are_part_of_the_graph.py.
    """
    results: list[Attention] = []
    collections.append((results, torch.is_grad_enabled()))
    try:
        yield results
    finally:
        collections.pop()


def mask_function(*, config: Any = None, **kwargs: Any) -> Tensor | None:
    """Mask for transformers, bool [b, 1, m, n]; None if the causal flag of the layers has the same effect."""
    if not torch.compiler.is_compiling():
        _examine_flags(config)
    if not _flags_replace_masks.get(type(config), False):
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sys.modules["transformers.masking_utils"].sdpa_mask(**kwargs)  # type: ignore[no-any-return]


_flags_replace_masks: dict[type, bool] = {}


def _examine_flags(config: Any) -> None:
    if type(config) not in _flags_replace_masks:
        _flags_replace_masks[type(config)] = _has_right_flags(type(config))


def _has_right_flags(config_class: type) -> bool:
    """Return whether the layers of all models with such a configuration have right causal flags.

    They do where transformers supports SDPA, which relies on them, and where every layer is causal.
    """
    models = [
        each
        for each in _subclasses(sys.modules["transformers.modeling_utils"].PreTrainedModel)
        if getattr(each, "config_class", None) is config_class
    ]
    if any(each._supports_sdpa for each in models):
        return True
    try:
        sources = {inspect.getsource(sys.modules[each.__module__]) for each in models}
    except (KeyError, OSError, TypeError):  # a class without source
        return False
    other = re.compile(r"self\.is_causal = (?!True$)", re.MULTILINE)
    return bool(sources) and not any(other.search(source) for source in sources)


def _subclasses(each: Any) -> set[Any]:
    return {each}.union(*map(_subclasses, each.__subclasses__()))


_previous: WeakKeyDictionary[nn.Module, dict[int, tuple[Any, str]]] = WeakKeyDictionary()


def _configurations(model: nn.Module, modeling: Any) -> list[Any]:
    """Configurations of all models inside a model; transformers' own setter omits some, as those of T5's halves."""
    configs = [part.config for part in model.modules() if isinstance(part, modeling.PreTrainedModel)]
    return list({id(config): config for config in configs}.values())


def _needing_their_masks(model: nn.Module, modeling: Any) -> set[int]:
    """Identities of configurations whose layers call softmax themselves, with the masks of their implementation."""
    parts = [part for part in model.modules() if isinstance(part, modeling.PreTrainedModel)]
    owners = {id(layer): part.config for part in parts for layer in part.modules()}  # the innermost part is the last
    return {
        id(owners[id(layer)])
        for _, layer in attention_layers(model, LAYERS)
        if not _mentions("get_interface(", layer) and _mentions("softmax(", layer) and id(layer) in owners
    }


def _mentions(call: str, layer: nn.Module) -> bool:
    """Return whether a call is in the source of a layer's classes, other than torch's."""
    classes = [each for each in type(layer).__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    try:
        return any(call in inspect.getsource(each) for each in classes)
    except (OSError, TypeError):  # a class without source
        return False


def _transformers(call: str) -> tuple[Any, Any]:
    try:
        return import_module("transformers.modeling_utils"), import_module("transformers.masking_utils")
    except ImportError:
        remedy = "Install it with pip install 'gradlogz[probe]'."
        raise MissingPackageError(call, "transformers", "transformers is not installed", remedy) from None
