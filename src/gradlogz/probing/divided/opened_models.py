"""Models that a process has opened: the trained one, or its random-weights baseline.

Read next: model_source.py, divided_pass.py (what is computed with them).
"""

from functools import lru_cache
from typing import NamedTuple

from torch import nn

from ..corpus.batching import Batch
from ..inside.architecture import Architecture
from ..inside.discovery import discover
from ..inside.random_models import with_random_weights
from ..passes.placement import placed
from ..prediction import Prediction
from ..prediction_files import selected
from ..statistics import stream_seed
from .model_source import ModelSource


class Opened(NamedTuple):
    """A model with its architecture. reason: why it is not the random-weights baseline that it should be."""

    model: nn.Module
    architecture: Architecture
    reason: str = ""


class _Cache:
    """The model that this process used last: the trained one or its baseline, never both."""

    def __init__(self) -> None:
        self._key: tuple[ModelSource, bool, int] | None = None
        self._opened: Opened | None = None
        self._loaded: tuple[ModelSource, nn.Module] | None = None

    def give(self, source: ModelSource, model: nn.Module) -> None:
        """Use a model that this process has loaded, in place of loading it again."""
        self.clear()
        self._loaded = (source, model)

    def opened(self, source: ModelSource, first: Batch, *, random: bool) -> Opened:
        """Return the model, or its random-weights baseline; `first`: the batch on which it is discovered."""
        key = (source, random, int(first.keys.sum()))
        if self._opened is None or self._key != key:
            self._key = self._opened = None
            loaded = self._loaded
            model = loaded[1] if loaded is not None and loaded[0] == source else source.load().model
            reason = ""
            if random:
                try:
                    model = with_random_weights(model, seed=stream_seed("weights", source.seed))
                except ValueError as error:
                    reason = str(error)
            self._opened = Opened(model, discover(model, placed(first, model).inputs), reason)
            self._key = key
        return self._opened

    def clear(self) -> None:
        """Release the models."""
        self._key = self._opened = self._loaded = None


MODELS = _Cache()


@lru_cache(maxsize=1)
def predictions_of(source: ModelSource) -> list[Prediction]:
    """Return the predictions of a source; files of the user are run once in a process."""
    return selected(list(source.names), source.files)
