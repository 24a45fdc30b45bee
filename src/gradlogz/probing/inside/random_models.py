"""Random models of the architecture of a given one, freshly initialised.

A model that differs from its fresh initialisation need not have learned more than a scale; the matched baseline of
../passes/rotated_heads.py has the scale of the trained weights.

Read next: ../run_probe.py (measures them).
"""

import copy

import torch
from torch import nn

from ..._errors import InputValueError
from .offloading import is_offloaded


def with_random_weights(model: nn.Module, *, seed: int) -> nn.Module:
    """Return the random-weights baseline: a model of the same architecture with freshly initialised weights.

    A Hugging Face model is initialised as before training, any other by the `reset_parameters` of its modules. The
    state of torch's random number generators is preserved.
    """
    if is_offloaded(model):
        problem = "the weights are offloaded, and those of a second model would not fit into memory"
        raise InputValueError("with_random_weights", "model", problem, "Load the model on one device.")
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
