"""A prediction: one file of predictions/ with its declared texts and four functions.

    statistics     mergeable statistics of an event of a batch
    evaluate       values with confidence intervals, by layer and head, from the merged statistics
    null           null values of the same quantities: rotated matrices, matched draws, permuted tokens
    verdict        supported, refuted, inconclusive or not applicable, with numbers and no sentences

    PREDICTION = Prediction(__name__, DECLARATION, statistics, evaluate, null, verdict)

Read next: predictions/entropy.py (the simplest), run_probe.py (which calls them).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from .batch_pass import BatchPass
from .computed import Computed
from .inside.architecture import Architecture
from .inside.embeddings import WordVectors
from .inside.events import Event, ForwardOutput
from .inside.head_weights import HeadWeights
from .runs.judgement import Judgement, Measured
from .runs.records import Declaration, Finding

LAST = 1000  # order of a prediction that declares none

State = TypeVar("State")


@dataclass(frozen=True)
class Probed:
    """The probed model, as `evaluate` and `null` see it.

    Attributes:
        weights: matrices of each attention layer, or the reason why there are none.
        seed: seed of every random number in `evaluate` and `null`.
        computed: cache of results that `evaluate` and `null` share.
        words: vectors of words, by the names of the embedding and of the unembedding.
    """

    name: str
    architecture: Architecture
    weights: Mapping[str, HeadWeights | str]
    seed: int
    computed: Computed = field(default_factory=Computed, repr=False, compare=False)
    words: Mapping[str, WordVectors] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Baseline(Generic[State]):
    """Random models of the same architecture, on samples of the same windows.

    Attributes:
        state: merged statistics of one prediction, of an untrained model; empty unless the prediction asks for them.
        model: the untrained model; the probed one without it.
        matched: values of the attention layers with randomly rotated inputs (passes/rotated_heads.py), one list for
            each draw; empty if the prediction does not ask for them.
        rescaled: the same for random queries of the model's logit variance, as differences to the values of the model
            itself on the windows of the draw.
    """

    state: State
    model: Probed
    matched: tuple[list[Measured], ...] = ()
    rescaled: tuple[list[Measured], ...] = ()


def no_matrices(architecture: Architecture) -> Mapping[str, int]:  # noqa: ARG001
    """No large matrices: the default of `Prediction.matrices`."""
    return {}


@dataclass(frozen=True)
class Prediction(Generic[State]):
    """A claim of the theory about trained transformers, with its measurement and its decision rule.

    Attributes:
        name: name of its file; pass `__name__`.
        declaration: texts for readers, and the words of the result.
        statistics: the contribution of an event to the state, or None. States are statistics of
            `gradlogz.probing.statistics`, None, or dictionaries and NamedTuples of them.
        evaluate: values with confidence intervals, from the merged state.
        null: null values for the same layers, heads and quantities, where there is a null.
        verdict: findings with verdicts, and the result for the model.
        empty: the state before any text.
        order: position in tables.
        baseline: random models that `null` needs: none; the values of matched draws (`hypothesis_tests.matched_null`),
            in which `statistics` receives attention calls only, and `evaluate` no weights; or the statistics of one
            untrained model, whose values depend on its seed and have no band: a description, not the null of a test.
        rescaled: whether matched draws also measure random queries of the model's logit variance.
        matrices: size in bytes of each large matrix in the state, by name; predictions that share a matrix give it
            the same name.
    """

    name: str
    declaration: Declaration
    statistics: Callable[[Event | ForwardOutput, BatchPass], State | None]
    evaluate: Callable[[State, Probed], list[Measured]]
    null: Callable[[State, Probed, Baseline[State] | None], list[Measured]]
    verdict: Callable[[list[Finding]], Judgement]
    empty: Callable[[], State] = dict  # type: ignore[assignment]
    order: int = LAST
    baseline: Literal["none", "matched", "statistics"] = "none"
    rescaled: bool = False
    matrices: Callable[[Architecture], Mapping[str, int]] = no_matrices

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.name.rpartition(".")[2])
