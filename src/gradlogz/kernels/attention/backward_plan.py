"""Plan of the backward pass on a Hopper GPU: which program is at which tiles when, and whose turn it is to add.

    full      worker j: tile of keys j, tiles of queries j, j + 1, ..., T - 1, 0, ..., j - 1
    causal    worker j: tiles of keys j and T - 1 - j, so that all have the same work
    window    worker j: tile of keys T - 1 - j, the tiles of queries that see it

Every worker adds to the gradients of the queries that it is at. In these orders the workers of a head are at different
tiles of queries at any time, and those that add to the same tile come one after the other: in step, nobody waits. The
plan gives each step its rank among those of its tile of queries, so that sums have one order and results are bitwise
reproducible whoever is late.

Law: every pair of tiles that sees each other is in one step, and no waiting is circular.

Read next: hopper_backward.py (the kernel).
"""

import torch

from ..._typing import Tensor

KEYS = 128  # keys of a tile
# Flags of a tile of keys: its first and its last step.
FIRST, LAST = 1 << 28, 1 << 29

# For each worker, a program of one head: tiles of keys, each with its tiles of queries in the order of time.
Schedule = list[list[tuple[int, list[int]]]]


def schedule(n: int, rows: int, left: int | None, right: int | None, programs: int, units: int) -> Schedule:
    """Share the tiles of a head among workers so that few wait; `units` heads are worked on by `programs` programs."""
    key_tiles, tiles, ratio = -(-n // KEYS), -(-n // rows), KEYS // rows
    if left is None and right is None:
        items = [[(j, [(ratio * j + s) % tiles for s in range(tiles)])] for j in range(key_tiles)]
    elif left is None and right == 0:
        items = _causal(key_tiles, tiles, ratio)
    else:
        items = [[(j, _seen(j, n, rows, left, right))] for j in reversed(range(key_tiles))]
    workers = _workers(len(items), programs, units)
    return [[tile for item in items[worker::workers] for tile in item] for worker in range(workers)]


def _causal(key_tiles: int, tiles: int, ratio: int) -> Schedule:
    """Pairs of tiles of keys with equal work: j, which many queries see, and T - 1 - j, which few see.

    Three phases, in each of which the workers are at different tiles of queries: later half of the queries and earlier
    half of the keys, a rectangle, walked through cyclically; then the triangle of the earlier half, walked upwards;
    then that of the later half, walked downwards.
    """
    half = key_tiles // 2
    later = list(range(half * ratio, tiles))
    items: Schedule = []
    for j in range(key_tiles - half):
        pair = [(key_tiles - 1 - j, list(reversed(range((key_tiles - 1 - j) * ratio, tiles))))]
        if j < half:
            shift = j * ratio % len(later)
            pair.insert(0, (j, [*later[shift:], *later[:shift], *range(j * ratio, half * ratio)]))
        items.append(pair)
    return items


def _seen(j: int, n: int, rows: int, left: int | None, right: int | None) -> list[int]:
    """Tiles of queries that see a key of tile j."""
    first, last = j * KEYS, min(n, (j + 1) * KEYS) - 1
    low = 0 if right is None else max(0, first - right) // rows
    high = n - 1 if left is None else min(n - 1, last + left)
    return list(range(low, high // rows + 1))


def _workers(items: int, programs: int, units: int) -> int:
    """Number of workers of a head with the least time: rounds of heads times items of a worker."""
    choices = {-(-items // share) for share in range(1, items + 1)}
    return min(
        (workers for workers in choices if workers <= programs),
        key=lambda workers: (-(-units // (programs // workers)) * -(-items // workers), -workers),
    )


def plan(shares: Schedule, group: int, tiles: int) -> Tensor:
    """Table [workers, steps, 4] of a schedule for `group` query heads, with the rank of each step.

    Steps on the same tile of queries are ranked by time, then by worker. A step waits only for steps of smaller rank,
    thus for earlier times or the same time and earlier workers: no waiting is circular.
    """
    parts = [[_steps(j, torch.tensor(mine), group) for j, mine in share] for share in shares]
    lists = [torch.cat(part) for part in parts]
    table = torch.tensor([-1, 0, 0, 0]).repeat(len(lists), max(map(len, lists)), 1)
    for worker, steps in enumerate(lists):
        table[worker, : len(steps)] = steps
    target = (table[..., 2] * tiles + table[..., 0]).T.flatten()  # by time, then by worker
    order = target.argsort(stable=True)
    counts = target[order].unique_consecutive(return_counts=True)[1]
    first = (counts.cumsum(0) - counts).repeat_interleave(counts)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order)) - first
    table[..., 3] = rank.reshape(table.shape[1], table.shape[0]).T
    return table.int()


def _steps(j: int, mine: Tensor, group: int) -> Tensor:
    """Steps [steps, 4] of a tile of keys: tile of queries, tile of keys with flags, query head, room for the rank."""
    steps = torch.zeros((group, len(mine), 4), dtype=torch.long)
    steps[..., 0] = mine
    steps[..., 1] = j
    steps[..., 2] = torch.arange(group)[:, None]
    steps = steps.flatten(0, 1)
    steps[0, 1] += FIRST
    steps[-1, 1] += LAST
    return steps
