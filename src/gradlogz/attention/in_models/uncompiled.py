"""Compiled functions inside a model, run eagerly: neither calls nor sums inside their graphs can be intercepted."""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def uncompiled() -> AbstractContextManager[Any]:
    """Context that runs compiled functions eagerly."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
