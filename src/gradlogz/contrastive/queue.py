"""Queue of candidates from earlier batches, as negatives without another pass of the encoder.   [he20]

    loss_i = -log [ exp(s_i+) / (exp(s_i+) + sum over the queue of exp(s_ij)) ]

The queue holds only negatives, so pass positives as vectors: info_nce(anchor, queue.candidates, positive=key). Put the
keys of a batch into the queue after its loss: before it, each positive would be its own negative.

Read next: losses/.
"""

import torch

from .._errors import InputValueError, shape_of
from .._typing import Float, Int, Tensor
from .distributed import announcing, gather_rows, is_distributed
from .validation import check_integers


class Queue(torch.nn.Module):
    """The last `size` vectors that were added, without gradients; saved and moved with the model.

    If torch.distributed runs with several processes, `put` adds the vectors of all of them. All queues are then equal,
    and DistributedDataParallel, which copies the buffers of the first process to the others, changes nothing.

    Args:
        size: number of vectors.
        dim: their dimension.
        gather: False to store only the vectors of this process; DistributedDataParallel then needs
            broadcast_buffers=False.

    >>> import torch
    >>> from gradlogz import info_nce
    >>> queue = Queue(6, 3)
    >>> for _ in range(2):
    ...     anchor, key = torch.randn(4, 3), torch.randn(4, 3)
    ...     loss = info_nce(anchor, queue.candidates, positive=key, temperature=0.07)  # 0 while the queue is empty
    ...     queue.put(key)
    >>> queue.candidates.shape
    torch.Size([6, 3])
    """

    vectors: Tensor
    labels_of_all: Tensor

    def __init__(self, size: int, dim: int, *, gather: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gather = gather
        if size < 1 or dim < 1:
            fact, remedy = f"size={size}, dim={dim}", "Pass the number of vectors and their dimension."
            raise InputValueError("Queue", "size", f"size and dim must be at least 1, got {fact}", remedy)
        self.register_buffer("vectors", torch.zeros(size, dim, dtype=dtype))
        self.register_buffer("labels_of_all", torch.full((size,), -1))
        self._filled = self._place = 0

    @torch.no_grad()
    def put(self, vectors: Float[Tensor, "m d"], labels: Int[Tensor, " m"] | None = None) -> None:
        """Add vectors in place of the oldest ones, with labels (default -1); at most the last `size` are stored."""
        if self.gather and is_distributed():
            with announcing(None, self.vectors):
                self._check(vectors, labels)
                vectors = gather_rows(vectors)
                labels = None if labels is None else gather_rows(labels)
        else:
            self._check(vectors, labels)
        size = self.vectors.shape[0]
        count = min(vectors.shape[0], size)
        index = (self._place + torch.arange(count, device=self.vectors.device)) % size
        self.vectors[index] = vectors[-count:].to(self.vectors)
        self.labels_of_all[index] = -1 if labels is None else labels[-count:].to(self.labels_of_all)
        self._place, self._filled = (self._place + count) % size, min(size, self._filled + count)

    def _check(self, vectors: Tensor, labels: Tensor | None) -> None:
        """Check the arguments of `put`."""
        dim = self.vectors.shape[1]
        if vectors.ndim != 2 or vectors.shape[1] != dim:
            fact, remedy = f"shape {shape_of(vectors)}", "Project them to that dimension, or build another queue."
            raise InputValueError("Queue.put", "vectors", f"vectors must be [m, {dim}], got {fact}", remedy)
        if labels is not None:
            check_integers("Queue.put", "labels", labels, tuple(vectors.shape[:1]), vectors)

    @property
    def candidates(self) -> Float[Tensor, "n d"]:
        """The stored vectors, [n, d]; a copy, so that the next `put` does not change the backward pass."""
        return self.vectors[: self._filled].clone()

    @property
    def labels(self) -> Int[Tensor, " n"]:
        """Labels of the stored vectors, [n]; as ids=(ids of anchors, queue.labels) they exclude false negatives."""
        return self.labels_of_all[: self._filled].clone()

    def __len__(self) -> int:
        return self._filled

    def get_extra_state(self) -> dict[str, int]:
        """Number of stored vectors and the next position, for a state dict."""
        return {"filled": self._filled, "place": self._place}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """Restore the number of stored vectors and the next position from a state dict."""
        self._filled, self._place = state["filled"], state["place"]
