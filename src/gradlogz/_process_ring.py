"""Tensors passed around a ring of processes: each sends to a later rank and receives from an earlier one."""

import torch
from torch import Tensor, distributed


class OtherProcessError(RuntimeError):
    """Another process raised an error or has ended, so that this one cannot continue."""


class Exchange:
    """Tensors on their way to the process `distance` ranks on; computation may go on until `received` is called."""

    def __init__(self, tensors: list[Tensor], group: "distributed.ProcessGroup | None", *, distance: int = 1) -> None:
        world, rank = distributed.get_world_size(group), distributed.get_rank(group)
        self._sent, self._received, self._requests = [t.contiguous() for t in tensors], tensors, []
        if distance % world == 0:
            return
        after, before = (rank + distance) % world, (rank - distance) % world
        if group is not None:
            after, before = (distributed.get_global_rank(group, r) for r in (after, before))
        self._received = [torch.empty_like(t) for t in self._sent]
        self._requests = distributed.batch_isend_irecv([
            *(distributed.P2POp(distributed.isend, t, after, group) for t in self._sent),
            *(distributed.P2POp(distributed.irecv, t, before, group) for t in self._received),
        ])  # fmt: skip

    def received(self) -> list[Tensor]:
        """Wait for the tensors of the earlier process and return them."""
        try:
            for request in self._requests:
                request.wait()
        except RuntimeError as error:
            raise OtherProcessError(f"A neighbour on the ring of processes does not answer. {error}") from error
        return self._received


def ranks_of_blocks(group: "distributed.ProcessGroup | None") -> list[int]:
    """Rank whose block this process holds at each step: first its own, then that of the preceding rank."""
    world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    return [(rank - step) % world for step in range(world)]
