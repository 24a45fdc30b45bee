"""Parquet files of strangers.

Some damaged files make polars end its process, and few bytes may declare many rows. A file is therefore first read in a
process of its own, without memory for more cells than its bytes can say.

Read next: tracking/columns.py, probing/runs/run_folder.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import polars

CELLS_OF_A_BYTE = 100  # of a file; numbers that are measured have about one
FEW_CELLS = 1_000_000  # which are read in any case
TRIAL = """
import sys, polars
path, most = sys.argv[1], int(sys.argv[2])
table = polars.scan_parquet(path, glob=False)
cells = len(table.collect_schema()) * table.select(polars.len()).collect().item()
if cells <= most:
    polars.read_parquet(path, glob=False)
print(cells)
"""


class UnreadableTableError(ValueError):
    """A parquet file that is damaged, or declares far more cells than its bytes can say."""


def read_parquet(path: Path) -> "polars.DataFrame":
    """Return the table of a parquet file, or raise UnreadableTableError with what is wrong about the file."""
    import polars

    size = path.stat().st_size
    most = max(FEW_CELLS, CELLS_OF_A_BYTE * size)
    words = [sys.executable, "-P", "-c", TRIAL, os.fspath(path.absolute()), str(most)]
    trial = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    if trial.returncode != 0:
        raise UnreadableTableError("is not a valid parquet file")
    if int(trial.stdout) > most:
        raise UnreadableTableError(f"declares {int(trial.stdout):,} cells in {size:,} bytes")
    return polars.read_parquet(path, glob=False)
