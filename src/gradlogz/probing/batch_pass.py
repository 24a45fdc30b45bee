"""State shared by all predictions while one batch passes through the model.

    batch_pass.real(event)                   mask of the tokens of an event that are not padding
    batch_pass.documents                     bootstrap weights of its documents, for sums_of
    batch_pass.once(tensor, name, compute)   a result that several predictions use, computed once per event
    batch_pass.memory(_Memory)               an object in which one prediction stores data from event to event

Results of `once` last for one event, memories for the batch.

Read next: inside/events.py (the events), prediction.py (its `statistics` receives both).
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
    """A batch, and the results computed once for all predictions while it passes through the model."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.documents = DocumentWeights(batch.keys)
        self._of_event = Computed()
        self._memories: dict[Callable[[], Any], Any] = {}

    def begin_event(self) -> None:
        """Discard the results of the preceding event."""
        self._of_event.clear()

    def once(self, subject: object, name: Hashable, compute: Callable[[], T]) -> T:
        """Return the result of this name for a tensor or record of the event, computed at the first call."""
        return self._of_event.once(subject, name, compute)

    def memory(self, kind: Callable[[], T]) -> T:
        """Return the one instance of a class in this batch, constructed without arguments at the first call."""
        if kind not in self._memories:
            self._memories[kind] = kind()
        memory: T = self._memories[kind]
        return memory

    def real(self, event: Attended | Passed | Normed) -> Bool[Tensor, "b n"]:
        """Return the mask of the event's tokens (queries, or tokens of the stream) that are not padding."""
        like = event.attention.log_normalizer if isinstance(event, Attended) else event[1]
        b, n = (like.shape[0], like.shape[-1]) if isinstance(event, Attended) else like.shape[:2]
        for name in ("attention_mask", "decoder_attention_mask"):
            mask = self.batch.inputs.get(name)
            if mask is not None and tuple(mask.shape) == (b, n):
                return mask.to(like.device).bool()
        return torch.ones(b, n, dtype=torch.bool, device=like.device)
