"""Detections of moving targets, filtered.

track           a file, columns or a built-in scenario, filtered and perhaps smoothed; Tracks
table_of        a row for each detection, by column; write_table writes it as CSV or parquet
"""

from .run_tracking import track as track
from .records import Tracks as Tracks
from .table import table_of as table_of, write_table as write_table
