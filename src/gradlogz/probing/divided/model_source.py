"""The source of a model, from which every worker loads it.

Read next: divided_pass.py (the parts that need it), ../inside/loading.py.
"""

from typing import NamedTuple

from ..inside.loading import Loaded, load


class ModelSource(NamedTuple):
    """Options with which a worker loads a model and its predictions.

    label: name of the model in findings. names, files: those of predictions, as in `selected`.
    seed: that of all null models.
    """

    label: str
    source: str
    revision: str | None
    device: str | None
    device_map: str | None
    dtype: str | None
    allow_pickle: bool
    allow_remote_code: bool
    names: tuple[str, ...]
    files: tuple[str, ...]
    seed: int

    def load(self) -> Loaded:
        """Load the model with its tokenizer."""
        return load(
            self.source, revision=self.revision, device=self.device, device_map=self.device_map, dtype=self.dtype,
            allow_pickle=self.allow_pickle, allow_remote_code=self.allow_remote_code,
        )  # fmt: skip
