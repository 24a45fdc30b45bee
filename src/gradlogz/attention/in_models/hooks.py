"""Hooks of a running model that copies of the model and its compiled graphs do not contain, and where they run.

Read next: interception.py and compiled_passes.py, which install them.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..._errors import InputNotImplementedError


class Hook:
    """A hook that does nothing in copies of the model, after saving and loading, and while a graph is compiled.

    Compiled, it would change the graph: torch's compiler traces the hooks of a module with it.
    """

    def __init__(self, run: Callable[..., None]) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> None:
        if not torch.compiler.is_compiling():
            self._run(*arguments)

    def __deepcopy__(self, memo: Any) -> "Hook":
        return Hook(_nothing)

    def __reduce__(self) -> Any:
        return Hook, (_nothing,)


def _nothing(*arguments: Any) -> None:
    pass


def in_backward() -> bool:
    """Return whether this runs inside the backward pass, where checkpoints are recomputed."""
    return torch._C._current_graph_task_id() != -1


def refuse_vmap(call: str, layer: str) -> None:
    """Raise under torch.vmap, whose tensors cannot be used after the transform has ended."""
    transforms = torch._C._functorch.get_interpreter_stack() or ()
    if any(each.key() == torch._C._functorch.TransformType.Vmap for each in transforms):
        problem = f"model must run outside torch.vmap, but {layer} runs inside it"
        remedy = "Leave the context first, or pass the batch to the model directly."
        raise InputNotImplementedError(call, "model", problem, remedy)
