"""The feed-forward sublayer of a model as a map of tokens: its update for any input.

    F(z)      z: input of the sublayer, the output of the norm before it; F(z): what it adds to the residual stream

No module need compute F alone (in a BERT it is spread over two). The block of the layer is therefore run with its
recorded arguments up to the residual sum of F, and z is put in place of the norm's output. What attention computes in
that run has no effect on F(z).

Read next: layer_blocks.py (blocks), layer_dynamics.py (the caller).
"""

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..._typing import Float, Tensor
from ..inside.architecture import SumSite
from ..inside.hooks import Running, evaluation_mode, module_hooks, operands
from ..inside.reprojection import CACHES
from .layer_blocks import BlockCall, LayerBlock


class FeedForwardBlock:
    """The map F of one layer, as `Ascent.feed_forward` takes it."""

    def __init__(self, model: nn.Module, block: LayerBlock, call: BlockCall) -> None:
        feed_forward = block.feed_forward
        assert feed_forward is not None
        self._call = call
        norm = feed_forward.reads or feed_forward.norm_of_stream
        self._norm = None if norm is None else model.get_submodule(norm.name)
        self._sum = _inside(feed_forward.sum, block)
        self._operand = 1 - feed_forward.stream
        self._stream = _inside(block.attention.sum, block)

    @torch.no_grad()
    def __call__(self, tokens: Float[Tensor, "*b n D"]) -> Float[Tensor, "*b n D"]:
        rows, n, width = self._call.tokens.shape
        flat = tokens.reshape(-1, width)
        parts = [self._update(part) for part in flat.split(rows * n)]
        return torch.cat(parts).reshape(tokens.shape).to(tokens)

    def _update(self, part: Tensor) -> Tensor:
        """Return F of at most as many tokens as the recorded call has, padded with 0."""
        recorded, args, kwargs = self._call.tokens, self._call.args, self._call.kwargs
        z = torch.zeros_like(recorded)
        z.view(-1, z.shape[-1])[: len(part)] = part.to(z)
        run = _Run(self._sum, self._operand, self._stream, z, replaces=self._norm is None)
        with ExitStack() as stack:
            if self._norm is not None:
                hook = self._norm.register_forward_hook(lambda module, args, result: z.reshape(result.shape))
                stack.callback(hook.remove)
            stack.enter_context(evaluation_mode(self._call.module))
            stack.enter_context(suppress(_Stop))
            stack.enter_context(module_hooks(self._call.module, run))
            stack.enter_context(run)
            self._call.module(*args, **{name: None if name in CACHES else v for name, v in kwargs.items()})
        assert run.update is not None  # the sum was found in this block
        return run.update.reshape(-1, z.shape[-1])[: len(part)]


def _inside(site: SumSite, block: LayerBlock) -> SumSite:
    """Return a site relative to its block, whose modules are called once."""
    name = site.module[len(block.module) :].removeprefix(".") if block.module else site.module
    return SumSite(name, 1, site.sum)


class _Stop(Exception):  # noqa: N818 - control flow: the update has been recorded
    pass


class _Run(TorchFunctionMode):
    """A run of a block that stops at the sum of the feed-forward update.

    replaces: whether the sum of attention is replaced by z, for a sublayer without a norm before it.
    """

    def __init__(self, sum_: SumSite, operand: int, stream: SumSite, z: Tensor, *, replaces: bool) -> None:
        super().__init__()
        self._sum, self._operand, self._stream, self._z, self._replaces = sum_, operand, stream, z, replaces
        self._running = Running()
        self.update: Tensor | None = None

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record the beginning of a module call."""
        self._running.enter(name)

    def leave(self, name: str, module: nn.Module, argument: Tensor | None, result: Tensor | None) -> None:
        """Record the end of a module call."""
        self._running.leave(name)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pair = operands(func, args)
        if pair is not None and pair[0].shape[-1] == self._z.shape[-1]:
            site = self._running.summed()
            if site == self._sum:
                self.update = pair[self._operand]
                raise _Stop
            if self._replaces and site == self._stream:
                return self._z.reshape(pair[0].shape)
        return func(*args, **(kwargs or {}))
