"""Weights outside the device that computes: in memory or on disk, moved to the device while their module runs.

accelerate places such weights for a device map of transformers. Between calls the parameters of a module are on the
device "meta" and have no values.

    device_of(model)         the device that computes
    devices_of(model)        all of them; meta if weights have no values anywhere
    with present(module):    the parameters of the module have values
    plain_copy(module)       a copy with values, which computes without accelerate

Read next: loading.py (device maps), norms.py and feed_forward.py (which read parameters).
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

META = torch.device("meta")
_WRAPPING = ("_hf_hook", "_old_forward", "forward")  # attributes by which accelerate replaces `forward`


def is_offloaded(module: nn.Module) -> bool:
    """Return whether some weights of a module, or of its parts, have no values between calls."""
    return any(p.device == META for p in module.parameters())


def devices_of(model: nn.Module) -> set[torch.device]:
    """Return the devices that compute: those of the parameters, and those to which offloaded ones are moved."""
    devices: set[torch.device] = set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            hook: Any = getattr(module, "_hf_hook", None)
            moved = parameter.device == META and getattr(hook, "offload", False)
            devices.add(_indexed(hook.execution_device) if moved else parameter.device)
    return devices


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model, also if its first parameter is offloaded."""
    first = next(model.parameters()).device
    return first if first != META else next(iter(devices_of(model)))


@contextmanager
def present(module: nn.Module) -> Iterator[None]:
    """Context in which the parameters of a module without submodules have values."""
    aligned: Any = nullcontext()
    if is_offloaded(module):
        from accelerate.utils import align_module_device

        aligned = align_module_device(module)
    with aligned:
        yield


def plain_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module without submodules, with values, which computes without the hooks of accelerate."""
    with present(module):
        names = [name for name in _WRAPPING if name in module.__dict__] if "_hf_hook" in module.__dict__ else []
        wrapping = {name: module.__dict__.pop(name) for name in names}
        try:
            return copy.deepcopy(module)
        finally:
            module.__dict__.update(wrapping)


def _indexed(device: Any) -> torch.device:
    """Return a device of accelerate, which numbers GPUs."""
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
