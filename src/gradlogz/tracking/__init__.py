"""Detections of moving targets, filtered, with a table and a page of what was found.

track       a file, columns or a built-in scenario, filtered and perhaps smoothed; Tracks
"""

from .run_tracking import Tracks, track

__all__ = ["track", "Tracks"]
