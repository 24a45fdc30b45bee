"""Kinds of attention layers, by the attributes that models give them.

    sliding    `sliding_window` is a number, or the layer's type in its configuration is sliding or local
    MLA        multi-head latent attention: `kv_lora_rank`, the rank of keys and values
    cross      the class name or the flag `is_cross_attention`
    full       any other

Read next: monitor_rows.py (rows name the kind of each layer).
"""

from torch import nn


def kind_of(module: nn.Module) -> str:
    """Kind of an attention layer."""
    if isinstance(getattr(module, "kv_lora_rank", None), int):
        return "MLA"
    if getattr(module, "is_cross_attention", False) is True or "cross" in type(module).__name__.lower():
        return "cross"
    types = getattr(module, "layer_type", ""), getattr(module, "attention_type", "")
    named_sliding = any(isinstance(each, str) and ("sliding" in each or "local" in each) for each in types)
    window = getattr(module, "sliding_window", None)
    if named_sliding or getattr(module, "is_sliding", False) is True or (isinstance(window, int) and window > 0):
        return "sliding"
    return "full"
