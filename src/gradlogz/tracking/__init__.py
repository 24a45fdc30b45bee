"""Tracking: switching Kalman filters for detections of moving targets.

track           filter (and smooth) a file, columns or the built-in scenario; returns Tracks
table_of        columns with one row per detection; write_table writes them as CSV or parquet
frame_of        the same for polars, pandas, xarray or numpy
"""

from .run_tracking import track as track
from .records import Tracks as Tracks
from .table import frame_of as frame_of, table_of as table_of, write_table as write_table
