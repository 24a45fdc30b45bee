"""What a trained transformer says about the theory.

capture         one batch inside a model: queries, keys, values, and the stream about every sublayer
"""

from .capture import Attended, Captured, Normed, Passed, capture

__all__ = ["capture", "Captured", "Attended", "Passed", "Normed"]
