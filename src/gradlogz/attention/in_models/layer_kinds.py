"""Kinds of attention layers, by the attributes that models give them and the names of their classes.

    sliding    `sliding_window` is a number, or the layer's type in its configuration is sliding or local
    MLA        multi-head latent attention: `kv_lora_rank`, the rank of keys and values
    cross      the class name or the flag `is_cross_attention`
    full       any other layer that computes a softmax

    linear     the layer's type in its configuration is linear, or the class name is that of linear attention, of a
               delta rule or of RWKV; sums over keys in a state of fixed size
    sigmoid    the class name has "sigmoid"

The last two compute no softmax. A name alone is not enough for them: a class whose source calls softmax or the
attention function of a library is never one of them, so that a softmax that escapes interception stays an error.

Read next: monitor_rows.py (rows name the kind of each layer), observation.py (layers without softmax).
"""

import inspect
import re
from functools import cache
from typing import Any

from torch import nn

LINEAR = re.compile(r"(?i)linear(self)?attention|lightning|delta(net|attention)|rwkv\w*attention|retention")
SIGMOID = re.compile(r"(?i)sigmoid")
SOFTMAX_CALLS = ("softmax(", "scaled_dot_product", "get_interface(", "multi_head_attention_forward", "flash_attn")


def kind_of(module: nn.Module) -> str:
    """Kind of an attention layer that computes a softmax."""
    if isinstance(getattr(module, "kv_lora_rank", None), int):
        return "MLA"
    if getattr(module, "is_cross_attention", False) is True or "cross" in type(module).__name__.lower():
        return "cross"
    named_sliding = any("sliding" in each or "local" in each for each in _types(module))
    window = getattr(module, "sliding_window", None)
    if named_sliding or getattr(module, "is_sliding", False) is True or (isinstance(window, int) and window > 0):
        return "sliding"
    return "full"


def kind_without_softmax(module: nn.Module) -> str | None:
    """Kind of an attention layer that computes no softmax, "linear" or "sigmoid"; None if it is not known to be one."""
    name = type(module).__name__
    linear = LINEAR.search(name) or any("linear" in each for each in _types(module) if "attention" in name.lower())
    if not (linear or SIGMOID.search(name)) or _calls_softmax(_class_of(module)):
        return None
    return "linear" if linear else "sigmoid"


def _class_of(module: nn.Module) -> Any:  # of type Any, since mypy takes no class of modules for hashable
    return type(module)


def _types(module: nn.Module) -> list[str]:
    """Types of a layer in its configuration."""
    types = getattr(module, "layer_type", ""), getattr(module, "attention_type", "")
    return [each for each in types if isinstance(each, str)]


@cache
def _calls_softmax(layer: Any) -> bool:
    """Return whether the source of a class, other than torch's, calls softmax; True where there is no source."""
    classes = [each for each in layer.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    try:
        sources = [inspect.getsource(each) for each in classes]
    except (OSError, TypeError):
        return True
    return any(call in source for source in sources for call in SOFTMAX_CALLS)
