"""One batch on its way through the model: what all predictions share while its events arrive.

    batch_pass.real(event)                   which tokens of an event are no padding
    batch_pass.documents                     the bootstrap weights of its documents, for sums_of
    batch_pass.once(tensor, name, compute)   what several predictions want of an event, computed once
    batch_pass.memory(_Memory)               what one prediction keeps from event to event

Results of `once` last for one event, memories for the batch.

Read next: inside/events.py (the events), prediction.py (who is given both).
"""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch

from .._typing import Bool, Tensor
from .computed import Computed
from .corpus.batching import Batch
from .inside.events import Attended, Normed, Passed
from .statistics import DocumentWeights

T = TypeVar("T")


class BatchPass:
    """A batch, and what is computed once for all predictions while it passes the model."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.documents = DocumentWeights(batch.keys)
        self._of_event = Computed()
        self._memories: dict[Callable[[], Any], Any] = {}

    def begin_event(self) -> None:
        """Let go of what was computed for the event before."""
        self._of_event.clear()

    def once(self, subject: object, name: Hashable, compute: Callable[[], T]) -> T:
        """The result of this name for a tensor or record of the event; computed for the first prediction that asks."""
        return self._of_event.once(subject, name, compute)

    def memory(self, kind: Callable[[], T]) -> T:
        """The one object of a class in this batch, made without arguments at the first call."""
        if kind not in self._memories:
            self._memories[kind] = kind()
        memory: T = self._memories[kind]
        return memory

    def real(self, event: Attended | Passed | Normed) -> Bool[Tensor, "b n"]:
        """The tokens of an event that are no padding: its queries, or the tokens of the stream."""
        like = event.attention.log_normalizer if isinstance(event, Attended) else event[1]
        b, n = (like.shape[0], like.shape[-1]) if isinstance(event, Attended) else like.shape[:2]
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = self.batch.inputs.get(name)
            if mask is not None and tuple(mask.shape) == (b, n):
                return mask.to(like.device).bool()
        return torch.ones(b, n, dtype=torch.bool, device=like.device)
