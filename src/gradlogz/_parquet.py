"""Parquet files: written, and read if they come from strangers.

Some damaged files make polars end its process, and few bytes may declare many rows or long texts. A file is therefore
first read in a process of its own, this module as a script, whose memory is limited by the size of the file.

Read next: tracking/columns.py, probing/runs/run_folder.py.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import polars

OF_A_BYTE = 100  # cells, and bytes of text, for each byte of a file; numbers that are measured have about one cell
FEW_CELLS = 10_000_000  # which are read in any case
SHORT_TEXT = 100_000_000  # bytes of all texts, which are read in any case
BYTES_OF_A_CELL = 32  # of memory in the first process, at most
ROOM = 2**31  # bytes of memory that the first process has in any case


class UnreadableTableError(ValueError):
    """A parquet file that is damaged, or declares far more than its bytes can say."""


def write_parquet(frame: "polars.DataFrame", path: Path, **options: Any) -> None:
    """Write a table to a file, whose name need not be UTF-8 as those that polars opens."""
    with path.open("wb") as file:
        frame.write_parquet(file, **options)


def read_parquet(path: Path) -> "polars.DataFrame":
    """Return the table of a parquet file, or raise UnreadableTableError with what is wrong about the file."""
    import polars

    place = Path(polars.__file__).parents[1]
    # -P: a module in the working directory is not imported.
    words = [sys.executable, "-P", __file__, os.fspath(path.absolute()), os.fspath(place)]
    environment = {**os.environ, "POLARS_MAX_THREADS": "1"}
    try:
        trial = subprocess.run(
            words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False
        )
    except OSError as error:
        reason = f"is not read: the process that tries it first cannot be started ({error.strerror})"
        raise UnreadableTableError(reason) from None
    if trial.returncode != 0:
        raise UnreadableTableError("is not a valid parquet file")
    if problem := trial.stdout.strip():
        raise UnreadableTableError(problem)
    return polars.read_parquet(_source(os.fspath(path)), glob=False)


def _source(path: str) -> str | BinaryIO:
    """The path, or the open file if polars cannot open a file of this name."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return open(path, "rb")
    return path


def _problem(path: str) -> str:
    """Read a file, and return what is wrong about it; empty if nothing is."""
    import polars

    size = Path(path).stat().st_size
    most = max(FEW_CELLS, OF_A_BYTE * size)
    _limit_memory(ROOM + BYTES_OF_A_CELL * most)
    lazy = polars.scan_parquet(_source(path), glob=False)
    schema = lazy.collect_schema()
    nested = [name for name, dtype in schema.items() if dtype.is_nested()]
    if nested:
        return f"has lists or records in the column {nested[0]!r}, which are not read"
    cells = len(schema) * lazy.select(polars.len()).collect().item()
    if cells > most:
        return f"declares {cells:,} cells in {size:,} bytes"
    table = polars.read_parquet(_source(path), glob=False)
    texts = polars.col(polars.String, polars.Categorical, polars.Enum).cast(polars.String).str.len_bytes()
    lengths = table.select(texts, polars.col(polars.Binary).bin.size())
    length = sum(column.cast(polars.UInt64).sum() for column in lengths)
    if length > max(SHORT_TEXT, OF_A_BYTE * size):
        return f"declares {length:,} bytes of text in {size:,} bytes"
    return ""


def _limit_memory(more: int) -> None:
    """Limit the memory of this process to what it has and so many bytes, on systems where this is possible."""
    try:
        import resource

        present = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    least = present + more if most == resource.RLIM_INFINITY else min(present + more, most)
    resource.setrlimit(resource.RLIMIT_AS, (least, most))


if __name__ == "__main__":
    sys.path.append(sys.argv[2])  # where the first process has polars
    print(_problem(sys.argv[1]))
