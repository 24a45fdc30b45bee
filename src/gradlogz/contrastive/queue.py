"""A queue of candidates from earlier batches: negatives that cost no encoder.   [he20]

    loss_i = -log [ exp(s_i+) / (exp(s_i+) + sum over the queue of exp(s_ij)) ]

The queue holds negatives alone, so positives come as vectors: info_nce(anchor, queue.candidates, positive=key).

Read next: losses.py.
"""

import torch

from .._errors import InputValueError, shape_of
from .._typing import Float, Int, Tensor
from .validation import check_integers


class Queue(torch.nn.Module):
    """The last `size` vectors that were put in, without gradients; saved and moved with the model.

    >>> import torch
    >>> from gradlogz import info_nce
    >>> queue = Queue(6, 3)
    >>> queue.put(torch.randn(4, 3))
    >>> queue.put(torch.randn(4, 3))
    >>> queue.candidates.shape
    torch.Size([6, 3])
    >>> loss = info_nce(torch.randn(4, 3), queue.candidates, positive=torch.randn(4, 3), temperature=0.07)
    """

    vectors: Tensor
    labels_of_all: Tensor

    def __init__(self, size: int, dim: int, *, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if size < 1 or dim < 1:
            fact, remedy = f"size={size}, dim={dim}", "Pass how many vectors it holds, and of what dimension."
            raise InputValueError("Queue", "size", f"size and dim must be at least 1, got {fact}", remedy)
        self.register_buffer("vectors", torch.zeros(size, dim, dtype=dtype))
        self.register_buffer("labels_of_all", torch.full((size,), -1))
        self._filled = self._place = 0

    @torch.no_grad()
    def put(self, vectors: Float[Tensor, "m d"], labels: Int[Tensor, " m"] | None = None) -> None:
        """In the place of the oldest; of more than fit, the last. Labels are -1 where none were given."""
        size, dim = self.vectors.shape
        if vectors.ndim != 2 or vectors.shape[1] != dim:
            fact, remedy = f"shape {shape_of(vectors)}", "Project them first, or make another queue."
            raise InputValueError("Queue.put", "vectors", f"vectors must be [m, {dim}], got {fact}", remedy)
        if labels is not None:
            check_integers("Queue.put", "labels", labels, tuple(vectors.shape[:1]), vectors)
        count = min(vectors.shape[0], size)
        at = (self._place + torch.arange(count, device=self.vectors.device)) % size
        self.vectors[at] = vectors[-count:].to(self.vectors)
        self.labels_of_all[at] = -1 if labels is None else labels[-count:].to(self.labels_of_all)
        self._place, self._filled = (self._place + count) % size, min(size, self._filled + count)

    @property
    def candidates(self) -> Float[Tensor, "n d"]:
        """All that were put in and are still there. A copy, so that the next `put` leaves the backward pass alone."""
        return self.vectors[: self._filled].clone()

    @property
    def labels(self) -> Int[Tensor, " n"]:
        """Their labels: with those of the anchors, what hides false negatives from them."""
        return self.labels_of_all[: self._filled].clone()

    def __len__(self) -> int:
        return self._filled

    def get_extra_state(self) -> dict[str, int]:
        """How far it is filled, for a state dict."""
        return {"filled": self._filled, "place": self._place}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """The same, from one."""
        self._filled, self._place = state["filled"], state["place"]
