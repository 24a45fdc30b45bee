"""Tracks, for a terminal: how many, whether the filter is what it claims, errors beside the truth.

Read next: ../tracking/run_tracking.py (how they are made), ../commands/track.py (where they are printed).
"""

from rich.text import Text

from ..tracking.records import Tracks
from .tracks_wording import beside_truth, consistent, headline, skipped

COLOURS = {"agrees": "green", "departs": "red"}


def tracks_summary(tracks: Tracks) -> list[Text]:
    """The headline in the colour of its verdict, errors where the truth is known, and rows that were left out."""
    colour = COLOURS.get(consistent(tracks.consistency), "dim")
    others = [Text(words) for words in (beside_truth(tracks), skipped(tracks)) if words]
    return [Text(headline(tracks), f"bold {colour}"), *others]
