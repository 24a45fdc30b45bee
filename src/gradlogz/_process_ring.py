"""Tensors passed around a ring of processes, and errors of one process that end the call in all of them.

    Exchange            tensors to a later rank, in return for those of an earlier one
    agree               every process learns the numbers and the description of all, or the error of one
    announced_errors    a call whose error in one process is announced at the next `agree` of the others
    FirstError          steps of a ring that continue after an error, since the other processes wait for their blocks

A process that waits for one that has failed would wait for the timeout of the group. Therefore every exchange follows
an `agree`, with nothing between them that may fail, and a process that fails takes part in the next one.
"""

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, distributed

TEXT = 500  # bytes of a description or an error
RECORD = struct.Struct(f"<?q{TEXT}s")  # failed, number of rows, text


class ProcessError(RuntimeError):
    """Another process has failed or makes another call, so that this one cannot continue."""


def agree(call: str, group: Any, rows: int = 0, text: str = "", *, failed: bool = False) -> list[int]:
    """Number of rows of each process; an error in all of them if one has failed or has another text."""
    record = RECORD.pack(failed, rows, text.encode()[:TEXT])
    local = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(_device(group))
    everywhere = [torch.empty_like(local) for _ in range(distributed.get_world_size(group))]
    try:
        distributed.all_gather(everywhere, local, group=group)
    except RuntimeError as error:
        raise ProcessError(f"{call}: a process of the group has ended or does not answer. {_line(error)}") from error
    records = [RECORD.unpack(bytes(t.tolist())) for t in everywhere]
    texts = [text.rstrip(b"\0").decode(errors="replace") for _, _, text in records]
    failures = [f"rank {rank} has failed ({texts[rank]})" for rank, (bad, *_) in enumerate(records) if bad]
    if failures and not failed:
        raise ProcessError(f"{call}: {'; '.join(failures)}. Mend the call of this rank.")
    if not failures and len(set(texts)) > 1:
        facts = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
        raise ProcessError(f"{call}: processes must make the same call, got {facts}. Pass equal options on all ranks.")
    return [number for _, number, _ in records]


@contextmanager
def announced_errors(call: str, group: Any) -> Iterator[None]:
    """Context of a call on all processes of a group: an error of one is raised in the others, with its rank."""
    if not (distributed.is_available() and distributed.is_initialized()):
        yield
        return
    try:
        yield
    except ProcessError:
        raise
    except Exception as error:
        agree(call, group, text=_line(error), failed=True)
        raise
    agree(call, group, text="end of the call")


class FirstError(AbstractContextManager["FirstError"]):
    """Context for each step of a ring that keeps the first error; `raised` raises it when all blocks have passed."""

    error: Exception | None = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception) or isinstance(error, ProcessError):
            return False
        self.error = self.error or error
        return True

    def raised(self) -> None:
        """Raise the error, if there was one."""
        if self.error is not None:
            raise self.error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _device(group: Any) -> torch.device:
    """A device whose tensors the group can send: the CPU if possible, which needs no synchronisation."""
    world: Any = distributed.group.WORLD
    devices = (world if group is None else group)._device_types
    cpu = torch.device("cpu")
    return cpu if cpu in devices else torch.device(devices[0].type, torch.accelerator.current_device_index())


class Exchange:
    """Tensors on their way to the process `distance` ranks on; computation may go on until `received` is called."""

    def __init__(self, tensors: list[Tensor], group: "distributed.ProcessGroup | None", *, distance: int = 1) -> None:
        world, rank = distributed.get_world_size(group), distributed.get_rank(group)
        self._sent, self._received, self._requests = [t.contiguous() for t in tensors], tensors, []
        if distance % world == 0:
            return
        after, before = (rank + distance) % world, (rank - distance) % world
        self._neighbours = (before, after)
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
            here = f"rank {self._neighbours[0]} or {self._neighbours[1]} of the ring has ended or does not answer"
            raise ProcessError(f"{here}. {_line(error)}") from error
        return self._received


def ranks_of_blocks(group: "distributed.ProcessGroup | None") -> list[int]:
    """Rank whose block this process holds at each step: first its own, then that of the preceding rank."""
    world, rank = distributed.get_world_size(group), distributed.get_rank(group)
    return [(rank - step) % world for step in range(world)]
