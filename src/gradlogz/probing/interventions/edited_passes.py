"""Passes of a model in which one tensor is replaced.

    output    outputs of the heads of an attention call, before the output projection       [b, h, m, v]
    update    update of a residual branch, before it is added to the stream                 [b, n, D]

The layers before the replaced tensor compute what they computed without it, so that the replacement can be computed
beforehand, from another pass over the same batch. Every attention call is computed by `attend`, with and without a
replacement: a tensor that is replaced by itself changes no bit.

    with edited(model, architecture, Replacement("h.3.attn", "update", tensor)):
        model(**inputs)

`resuming` begins a pass at the block of the replaced tensor, which saves half of the time on average.

Read next: ../inside/following.py (the same sites, read only), gradient_steps.py and replaced_heads.py (the tensors).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..._typing import Tensor
from ...attention.in_models.interception import LAYERS, InterceptedCall, Interception, Receiver, numbered
from ...attention.result import Attention
from ..inside.architecture import Architecture, SumSite
from ..inside.hooks import Running, evaluation_mode, module_hooks, operands, tensors, without_cache


class Replacement(NamedTuple):
    """A tensor in place of one that a pass computes; `layer` is the name of the attention layer or of the branch."""

    layer: str
    part: Literal["output", "update"]
    tensor: Tensor


@contextmanager
def edited(
    model: nn.Module, architecture: Architecture, replacement: Replacement | None = None, *, layers: str = LAYERS
) -> Iterator[set[str]]:
    """Context in which every pass of the model computes with the replacement, in evaluation mode, without gradients.

    Yields the set of the attention layers whose outputs can be replaced, which a pass fills. Layers that multiply by
    the values themselves, and torch.nn.MultiheadAttention, are not among them.
    """
    pass_ = _EditedPass(architecture, replacement)
    updates = replacement is not None and replacement.part == "update"
    hooks = module_hooks(model, pass_) if updates else nullcontext()
    intercepted = Interception(model, pass_, layers=layers)
    mode = pass_ if updates else nullcontext()
    with torch.no_grad(), evaluation_mode(model), hooks, mode, intercepted:
        yield pass_.replaceable


def resumable_blocks(model: nn.Module, architecture: Architecture, inputs: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the blocks of a model, by name, whose passes may begin at any of them; empty if there are none.

    They are the outermost list of modules with a branch. Passes on these inputs (a few tokens suffice) test that what
    follows a block depends on the blocks before it through the output of the last of them alone.
    """
    branches = [s.name.split(".") for s in architecture.sublayers if "#" not in s.name]
    prefixes = (".".join(parts[:end]) for parts in branches for end in range(1, len(parts)))
    modules = dict(model.named_modules())
    name = next((each for each in prefixes if isinstance(modules.get(each), nn.ModuleList)), None)
    if name is None:
        return {}
    blocks = {f"{name}.{i}": block for i, block in modules[name].named_children()}
    if len(blocks) < len(list(modules[name])) or any("forward" in vars(block) for block in blocks.values()):
        return {}  # a block occurs twice, or is wrapped by another library
    with edited(model, architecture), recording(blocks) as outputs:
        expected = list(tensors(_plain(model(**inputs, **without_cache(model)))))
    for block in blocks:
        with edited(model, architecture), resuming(blocks, outputs, block):
            result = list(tensors(_plain(model(**inputs, **without_cache(model)))))
        if len(result) != len(expected) or not all(map(torch.equal, result, expected)):
            return {}
    return blocks


@contextmanager
def recording(blocks: Mapping[str, nn.Module]) -> Iterator[dict[str, Any]]:
    """Context in which a pass stores the outputs of the blocks, by name."""
    outputs: dict[str, Any] = {}
    hooks = [
        block.register_forward_hook(lambda module, args, output, name=name: outputs.update({name: output}))
        for name, block in blocks.items()
    ]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def resuming(blocks: Mapping[str, nn.Module], outputs: Mapping[str, Any], name: str) -> Iterator[None]:
    """Context in which a pass begins at the block of this name, with the recorded output of the block before it."""
    names = list(blocks)
    before = names[: names.index(name)] if name in names else []
    for each in before:
        # The earlier outputs are not read: each block passes on the last of them.
        blocks[each].forward = lambda *args, **kwargs: outputs[before[-1]]
    try:
        yield
    finally:
        for each in before:
            del blocks[each].forward


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


class _EditedPass(TorchFunctionMode, Receiver):
    """Receiver of attention calls and observer of sums, which puts the replacement in its place."""

    def __init__(self, architecture: Architecture, replacement: Replacement | None) -> None:
        super().__init__()
        self._width, self._replacement = architecture.width, replacement
        branches = [s for s in architecture.sublayers if replacement is not None and s.name == replacement.layer]
        self._site: SumSite | None = None
        self._operand = 0
        if branches:
            self._site, self._operand = branches[0].update
        self._running = Running()
        self._calls: dict[str, None] = {}
        self.replaceable: set[str] = set()

    # Called by the interception of attention --------------------------------------------------------------------------

    def begin(self) -> bool:
        """Clear the counts of the preceding pass."""
        self._running.clear()
        self._calls = {}
        return True

    def receive(self, layer: str, met: InterceptedCall, *, again: bool) -> Attention:
        """Compute the call by `attend`, or return the replaced outputs."""
        name = numbered(layer, self._calls)
        self._calls[name] = None
        with torch._C.DisableTorchFunction():  # sums inside `attend` are not sums of the model
            attention = met.call.attend("none")
        if met.to_layer is not None:
            self.replaceable.add(name)
        replacement = self._replacement
        if replacement is not None and replacement.part == "output" and replacement.layer == name:
            return attention._replace(output=replacement.tensor)
        return attention

    def finish(self, missed: tuple[str, ...]) -> None:
        """Ignore layers whose calls were missed: they compute as usual."""

    # Called by the hooks of the modules -------------------------------------------------------------------------------

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the beginning of a module call; the root module begins a pass."""
        if not name:
            self._running.clear()
        self._running.enter(name)

    def leave(self, name: str, module: nn.Module, argument: Tensor | None, result: Tensor | None) -> None:
        """Record the end of a module call."""
        self._running.leave(name)

    # Called by every torch function -----------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pair = operands(func, args)
        if pair is None or pair[0].shape[-1] != self._width or self._running.summed() != self._site:
            return func(*args, **kwargs)
        replaced = list(args)
        replaced[self._operand] = self._replacement.tensor.clone()  # type: ignore[union-attr]  # a sum may be in place
        return func(*replaced, **kwargs)
