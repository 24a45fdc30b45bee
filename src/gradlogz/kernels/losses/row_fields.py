"""The numbers that the compiled code of row losses reads, at their places in one array.

Addresses are 0 where there is nothing. Large arrays lie in one memory, in which their places are counted in bytes.

Read next: row_products.py, row_losses.py (which read them), compiled_rows.py (which writes them).
"""

from ..simd import ROWS, read_integer
from ..workers import compiled

BLOCK = 8 * ROWS  # rows, and keys, of a task

NEXT_TASK, NEXT_THREAD, FIRST_STAGE, LAST_STAGE = range(4)
KIND, DECOUPLED, CENTRED, SETTINGS = range(4, 8)  # settings as float64: coefficient, factor, margin and constants
FIRST, M, N, D = range(8, 12)  # first row of this part, its rows, keys, dimension
QUERY, QUERY_ROW, KEY, KEY_ROW, BIAS, BIAS_STEP = range(12, 18)
POSITIVE, QUERY_LABELS, KEY_LABELS, MASK, ITSELF = range(18, 23)  # ITSELF: 1 for the number of the row
CENTRES, PANEL, TAIL, SCRATCH = range(23, 27)  # tail: last rows of the queries; scratch: two rows for each thread
SLOPE, SLOPE_ROW, LOSSES, GRAD_QUERY, GRAD_KEY, GRAD_BIAS = range(27, 33)
TOPS, SUMS = range(33, 35)  # clip: four numbers for each row, and column sums of each block
SUM, BASE, NUMBERS = 35, 36, 37  # base: the memory, in which the places of MEMORY are counted in bytes
MEMORY = CENTRES, PANEL, TAIL, SCRATCH, SLOPE, LOSSES, TOPS, SUMS


@compiled
def place(p: int, index: int) -> int:
    """Address of a part of the memory of a call."""
    return read_integer(p, BASE) + read_integer(p, index)


def round_up(number: int, step: int) -> int:
    """Round up to a multiple of step."""
    return -(-number // step) * step


up = compiled(round_up)
