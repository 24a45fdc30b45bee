"""Attention over a sequence that is split over processes, against `attend` on the whole sequence in one process.

python benchmarks/ring.py     writes benchmarks/results/ring.json

Every process has one thread, and gloo sends the keys. Seconds are processor time, so that more processes than cores may
be measured: those of a ring are of the process that takes longest, which on as many cores is the time of the ring but
for waiting. The ratio is that of P times these seconds to the seconds of one process with the whole sequence: 1 is a
perfect division.
"""

import json
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from gradlogz import attend
from gradlogz.attention import ring_attend, ring_positions

RESULTS = Path(__file__).parent / "results" / "ring.json"
HEADS, TOKENS, SIZE = 8, 8192, 64
ROUNDS = 3
CASES = [("contiguous", False), ("contiguous", True), ("zigzag", True)]


def seconds_of(call: Callable[[], None]) -> float:
    """Return the median processor time of a call, forward and backward."""
    times = []
    for number in range(1 + ROUNDS):
        begun = time.process_time()
        call()
        if number:
            times.append(time.process_time() - begun)
    return statistics.median(times)


def whole() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, HEADS, TOKENS, SIZE, generator=generator) for _ in range(3)]


def step(function: Any, tensors: list[torch.Tensor], **options: Any) -> None:
    """Forward and backward, with gradients of the output and of two statistics."""
    leaves = [t.clone().requires_grad_() for t in tensors]
    result = function(*leaves, **options)
    (result.output.sum() + result.log_normalizer.sum() + result.entropy.sum()).backward()


def rank_of(rank: int, processes: int, port: int, folder: str) -> None:
    """Measure the cases in one process of a ring, and write its seconds."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    seconds = []
    for placement, is_causal in CASES:
        here = ring_positions(TOKENS, placement=placement)
        parts = [t[:, :, here].contiguous() for t in whole()]
        options = {"is_causal": is_causal, "placement": placement}
        seconds.append(seconds_of(lambda p=parts, o=options: step(ring_attend, p, **o)))  # type: ignore[misc]
    Path(folder, str(rank)).write_text(json.dumps(seconds))
    distributed.destroy_process_group()


def ring(processes: int) -> list[list[float]]:
    """Return the seconds of every process, one list for each."""
    with tempfile.TemporaryDirectory() as folder:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        torch.multiprocessing.spawn(rank_of, (processes, port, folder), nprocs=processes)
        return [json.loads(Path(folder, str(rank)).read_text()) for rank in range(processes)]


def main() -> None:
    torch.set_num_threads(1)
    tensors = whole()
    alone = {causal: seconds_of(lambda c=causal: step(attend, tensors, is_causal=c)) for causal in (False, True)}  # type: ignore[misc]
    rows = []
    for processes in (2, 4):
        each = ring(processes)
        for number, (placement, causal) in enumerate(CASES):
            longest = max(seconds[number] for seconds in each)
            row = {"processes": processes, "placement": placement, "causal": causal, "seconds": round(longest, 3)}
            rows.append(
                row | {"whole": round(alone[causal], 3), "ratio": round(processes * longest / alone[causal], 3)}
            )
            print(rows[-1], flush=True)
    table = {
        "benchmark": "ring", "python": platform.python_version(), "torch": torch.__version__,
        "machine": platform.machine(), "shape": [1, HEADS, TOKENS, SIZE], "rows": rows,
    }  # fmt: skip
    RESULTS.write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
