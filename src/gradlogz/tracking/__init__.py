"""Detections of moving targets, filtered.

track           a file, columns or a built-in scenario, filtered and perhaps smoothed; Tracks
table_of        a row for each detection, by column; write_table writes it as CSV or parquet
"""

from .records import Tracks
from .run_tracking import track
from .table import table_of, write_table

__all__ = ["track", "Tracks", "table_of", "write_table"]
