"""Work for engines: functions that worker processes import, some of which die or fail."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import torch


class Item(NamedTuple):
    """A seed, and a folder in which items leave marks."""

    seed: int
    marks: str = ""
    seconds: float = 0.0


class Moments(NamedTuple):
    """A state with tensors, text and nested parts."""

    count: int
    sums: torch.Tensor
    parts: dict


def mark(item: Item) -> int:
    """Leave a mark, and return how many this item has."""
    path = Path(item.marks) / str(item.seed)
    with path.open("a") as file:
        file.write("x")
    return len(path.read_text())


def moments(item: Item) -> Moments:
    """A state that depends on the seed alone."""
    if item.marks:
        mark(item)
    time.sleep(item.seconds)
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(item.seed), dtype=torch.float64)
    return Moments(len(x), x.mT @ x, {("mean", item.seed): x.mean(0), "largest": float(x.max())})


def killed_once(item: Item) -> Moments:
    """The worker of item 2 is killed at its first attempt."""
    if mark(item) == 1 and item.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return moments(item._replace(marks=""))


def killed_while_writing(item: Item) -> Moments:
    """The worker of item 2 is killed at its first attempt, while it writes into the folder `work` beside the marks."""
    if mark(item) == 1 and item.seed == 2:
        kill_when_it_writes(Path(item.marks).parent / "work/items")
        return moments(item._replace(marks=""))._replace(sums=torch.zeros(2**25))
    return moments(item._replace(marks=""))


def kill_when_it_writes(folder: Path) -> None:
    """Kill this process as soon as it has written a part of a file into a folder."""
    before = set(folder.iterdir())

    def look() -> None:
        while not any(path.stat().st_size for path in {*folder.iterdir()} - before):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=look, daemon=True).start()


def always_killed(item: Item) -> Moments:
    """The worker of item 2 is always killed."""
    if item.seed == 2:
        mark(item)
        os.kill(os.getpid(), signal.SIGKILL)
    return moments(item)


def visible_gpus(item: Item) -> str:
    """The GPUs that the worker of an item may use."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "all")


def fails(item: Item) -> Moments:
    """Item 2 raises."""
    if item.seed == 2:
        raise ZeroDivisionError("seed two")
    return moments(item)
