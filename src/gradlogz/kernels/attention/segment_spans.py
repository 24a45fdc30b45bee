# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Tiles of keys that each tile of queries meets in its segments (packed documents), or the reverse, on a GPU.

    begin    inner        outer    end          tiles of keys
      | some  | all visible | some  |           visible to a tile of queries

A kernel of attention reads these four numbers for its tile: it skips all tiles outside begin .. end, and needs no mask
in inner .. outer. Any integers are segments, in any order; where the tiles of a segment are not adjacent, more are read
than needed, and masked.
"""

import torch
import triton
import triton.language as tl

from ..._typing import Int, Tensor
from .launching import Kernel

MOST_SEGMENT = tl.constexpr(2**63 - 1)
# Tiles that a program compares at the same time.
TOGETHER = 16


class SegmentSpans:
    """Tiles of columns that each tile of rows meets in its segments, for one kind of call.

    Rows and columns have the position of their first element, the number of elements, and the size of a tile.
    """

    def __init__(self, rows: tuple[int, int, int], columns: tuple[int, int, int]) -> None:
        self.tiles = triton.cdiv(rows[1], rows[2])
        self.numbers = *rows[:2], *columns[:2]
        self.kernel = Kernel(_segment_spans, (rows[2], columns[2], TOGETHER), {"num_warps": 4})

    def computed(self, segments: Int[Tensor, "#b n"], stream: int) -> tuple[Int[Tensor, "#b tiles 4"], int]:
        """Begin, inner, outer and end of each tile, and the step between batches, 0 if they share their segments."""
        spans = torch.empty((segments.shape[0], self.tiles, 4), dtype=torch.int32, device=segments.device)
        step = segments.stride(0) if len(segments) > 1 else 0
        self.kernel.launch(len(spans) * self.tiles, stream, (), (segments, spans), (step, *self.numbers))
        return spans, 4 * self.tiles if len(segments) > 1 else 0


@triton.jit
def _segment_spans(
    segments, spans, segments_batch, row_offset, row_limit, column_offset, column_limit,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Spans of every tile of rows over tiles of columns, as far as segments determine them.

    Tiles [begin, end) contain all that have a segment in common with it. In [inner, outer) every position has the one
    segment of the tile; the range is empty where such tiles are not adjacent.
    """
    tiles = tl.cdiv(row_limit, ROWS)
    batch = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    segments += batch.to(tl.int64) * segments_batch
    low, high = _extremes(segments, row_offset, row_limit, tile + tl.arange(0, 1), ROWS)
    low, high = tl.min(low, 0), tl.max(high, 0)
    columns = tl.cdiv(column_limit, COLUMNS)
    begin, end, inner, outer, alike = columns, columns * 0, columns, columns * 0, columns * 0
    for chunk in tl.range(0, columns, TOGETHER):
        index = chunk + tl.arange(0, TOGETHER)
        least, most = _extremes(segments, column_offset, column_limit, index, COLUMNS)
        meets = (least <= high) & (most >= low)
        equal = (least == high) & (most == low)
        begin = tl.minimum(begin, tl.min(tl.where(meets, index, columns), 0))
        end = tl.maximum(end, tl.max(tl.where(meets, index + 1, 0), 0))
        inner = tl.minimum(inner, tl.min(tl.where(equal, index, columns), 0))
        outer = tl.maximum(outer, tl.max(tl.where(equal, index + 1, 0), 0))
        alike += tl.sum(equal.to(tl.int32), 0)
    place = spans + tl.program_id(0) * 4
    tl.store(place, begin)
    tl.store(place + 1, inner)
    tl.store(place + 2, tl.where(alike == outer - inner, outer, 0))
    tl.store(place + 3, end)


@triton.jit
def _extremes(segments, offset, limit, index, SIZE: tl.constexpr):
    """Least and greatest segment in each of some tiles; a tile without positions has no segment between them."""
    number = index[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    there = number < limit
    least = tl.load(segments + offset + number, there, MOST_SEGMENT)
    most = tl.load(segments + offset + number, there, -MOST_SEGMENT)
    return tl.min(least, 1), tl.max(most, 1)
