"""What a prediction is: one file of predictions/ that declares its texts and defines the same four functions.

    statistics     of an event in a batch: statistics that merge
    evaluate       of the merged statistics: values with intervals, by layer and head
    null           the same values where the claim says nothing: of random weights, rotated matrices, permuted heads
    verdict        of values beside their nulls: supported, refuted, undecided or not applicable, and why

    PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict)

Read next: predictions/entropy.py (the plainest), run_probe.py (who calls them).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from .batch_pass import BatchPass
from .computed import Computed
from .inside.architecture import Architecture
from .inside.events import Event, ForwardOutput
from .inside.head_weights import HeadWeights
from .runs.judgement import Judgement, Measured
from .runs.records import Declaration, Finding

LAST = 1000  # the order of a prediction that does not say where it stands

State = TypeVar("State")


@dataclass(frozen=True)
class Probed:
    """A model that is probed.

    weights: the matrices of each attention layer, or the reason why it has none.
    seed: of everything random in evaluations and nulls.
    computed: what values and nulls both want, computed once.
    """

    name: str
    architecture: Architecture
    weights: Mapping[str, HeadWeights | str]
    seed: int
    computed: Computed = field(default_factory=Computed, repr=False, compare=False)


@dataclass(frozen=True)
class Twin(Generic[State]):
    """The same architecture with random weights, and what it showed on a part of the same tokens.

    state: the merged statistics of one prediction, empty for one that wants the weights alone.
    """

    state: State
    model: Probed


def no_matrices(architecture: Architecture) -> Mapping[str, int]:  # noqa: ARG001
    """Of a prediction whose statistics are small."""
    return {}


@dataclass(frozen=True)
class Prediction(Generic[State]):
    """A claim of the theory about trained transformers, and how it is measured and judged.

    Attributes:
        name: that of its file; given as `__name__`.
        declaration: what people read about it.
        statistics: what an event adds to the state; None if nothing. States are statistics of `gradlogz.probing.
            statistics`, None, or dictionaries and NamedTuples of them.
        evaluate: values with intervals, from the merged state.
        null: values under the null, for the same layers, heads and quantities; those without one are left out.
        verdict: the verdicts.
        empty: the state of no text.
        order: where it stands in tables, from the first to the last.
        baseline: what its nulls want of the random twin: what it read, or its weights alone, if anything.
        matrices: the bytes of each large matrix that its state keeps once all groups were met, by a name; predictions
            that keep the same matrix give it the same name.
    """

    name: str
    declaration: Declaration
    statistics: Callable[[Event | ForwardOutput, BatchPass], State | None]
    evaluate: Callable[[State, Probed], list[Measured]]
    null: Callable[[State, Probed, Twin[State] | None], list[Measured]]
    verdict: Callable[[list[Finding]], Judgement]
    empty: Callable[[], State] = dict  # type: ignore[assignment]
    order: int = LAST
    baseline: Literal["statistics", "weights"] = "statistics"
    matrices: Callable[[Architecture], Mapping[str, int]] = no_matrices

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.rpartition(".")[2])
