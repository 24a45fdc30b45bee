"""Detections of moving targets, filtered, with a table and a page of what was found.

track       a file, columns or a built-in scenario, filtered and perhaps smoothed; Tracks
"""

from .running import Tracks, track

__all__ = ["track", "Tracks"]
