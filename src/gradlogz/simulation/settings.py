"""Settings of a simulation: sizes, temperature, step size, contraction, initial distribution.

Read next: initial_clouds.py (the initial clouds), presets.py (named settings), run_simulation.py.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .._errors import InputValueError
from ..dynamics.contraction import NAMES, STEP_NAMES, ContractionLike
from .matrix_text import matrix_of, vector_of

CONTRACTIONS = (*NAMES, *STEP_NAMES)
INITIAL = ("gaussian", "uniform", "laplace", "exponential", "sphere", "circle")  # drawn by initial_clouds.py
PLACEMENTS = ("post", "pre", "peri")
KEY_MEASURES = ("none", "gaussian", "sphere")
CUSTOM = "given"  # initial distribution of a custom cloud


@dataclass(frozen=True)
class SimulationSettings:
    """Parameters of a simulation.

    Args:
        tokens: number of tokens of a cloud.
        dim: dimension of a token.
        beta: inverse temperature of attention.
        tau: step size; negative values descend.
        contraction: normalisation after each step; several are joined by "+" and applied in order: "center+rms_norm".
        initial: distribution of the initial tokens.
        steps: number of steps.
        placement: position of the contraction: "post", "pre" or "peri".
        causal: whether each token attends only to itself and earlier tokens.
        residual: whether the residual connection is kept.
        heads: number of heads; each has dim / heads coordinates, as in a transformer with identity weights.
        keys: number of fixed keys, drawn from `initial` if that is a sphere or circle, else Gaussian; with 0, tokens
            attend to each other.
        key_measure: measure in place of the keys: "gaussian" (of key_mean and key_covariance) or "sphere" (uniform, of
            radius sqrt(dim), 1 with the contraction sphere).
        key_mean: mean of Gaussian keys, a text such as "0.5" or "1,-0.5" (see matrix_text.py).
        key_covariance: covariance of Gaussian keys, a text such as "2", "2,0.5" (diagonal) or "2,0.6/0.6,0.5" (rows).
        qk_matrix: bilinear form B of the logits, a text as above.
        ov_matrix: value matrix W_v, a text as above; "qk" is B, which makes the step a gradient step.
        natural: whether the step follows the natural gradient.
        draws: number of keys that each token draws by their attention weights; with 0, attention itself.
        seeds: number of clouds.
        seed: seed of the first cloud; the others have the seeds that follow.
        every: recording interval in steps; 0 records on a logarithmic schedule: every step at first, then sixteen
            records per doubling of the time. The last step is always recorded.
    """

    tokens: int = 500
    dim: int = 8
    beta: float = 0.354
    tau: float = 0.5
    contraction: str = "zca"
    initial: str = "gaussian"
    steps: int = 600
    placement: str = "post"
    causal: bool = False
    residual: bool = True
    heads: int = 1
    keys: int = 0
    key_measure: str = "none"
    key_mean: str = "0"
    key_covariance: str = "1"
    qk_matrix: str = "1"
    ov_matrix: str = "qk"
    natural: bool = False
    draws: int = 0
    seeds: int = 4
    seed: int = 0
    every: int = 0

    @property
    def plain(self) -> bool:
        """True if weight matrices are identities, keys are tokens or points, and steps are gradient steps."""
        weights = self.qk_matrix == "1" and self.ov_matrix == "qk"
        return weights and self.key_measure == "none" and not self.natural and not self.draws

    @property
    def contraction_names(self) -> ContractionLike:
        """The contraction as a name or a tuple of names, as `evolve` takes it."""
        names = tuple(self.contraction.split("+"))
        return names[0] if len(names) == 1 else names

    @property
    def recorded_steps(self) -> list[int]:
        """Steps at which observables are recorded, the first and the last included."""
        times = [0]
        while (t := times[-1]) < self.steps:
            times.append(min(t + (self.every or 1 << max(0, t.bit_length() - 5)), self.steps))
        return times


def check(settings: SimulationSettings) -> None:
    """Raise an error for settings that cannot be simulated."""
    for wrong, argument, problem, remedy in _problems(settings):
        if wrong:
            raise InputValueError("simulate", argument, problem, remedy)


def _problems(s: SimulationSettings) -> Iterator[tuple[bool, str, str, str]]:
    """Possible problems: whether it occurs, argument, problem, remedy; later ones assume that earlier ones do not."""
    counts = {"tokens": 2, "dim": 1, "steps": 0, "heads": 1, "keys": 0, "draws": 0, "seeds": 1, "every": 0}
    for name, least in counts.items():
        value = getattr(s, name)
        wrong = not isinstance(value, int) or value < least
        yield wrong, name, f"{name} must be an integer of at least {least}, got {value}", f"Pass {least} or more."
    parts = s.contraction.split("+")
    unknown = [part for part in parts if part not in CONTRACTIONS]
    whitened = any(part in ("zca", "pca", "cholesky", "monge") for part in parts)
    for name in ("beta", "tau"):
        value = getattr(s, name)
        yield not _is_finite(value), name, f"{name} must be a finite number, got {value}", "Pass a finite number."
    yield from (
        (bool(unknown), "contraction", f"there is no contraction {(unknown or parts)[0]!r}",
         f"Choose one of {', '.join(CONTRACTIONS)}, or join several with +."),
        (s.initial not in INITIAL, "initial", f"there is no initial distribution {s.initial!r}",
         f"Choose one of {', '.join(INITIAL)}."),
        (s.placement not in PLACEMENTS, "placement", f"there is no placement {s.placement!r}",
         f"Choose one of {', '.join(PLACEMENTS)}."),
        (s.dim % s.heads != 0, "heads", f"heads must divide dim, got {s.heads} heads and dim {s.dim}",
         "Choose a number of heads that divides dim."),
        (s.key_measure not in KEY_MEASURES, "key_measure", f"there is no measure of keys {s.key_measure!r}",
         f"Choose one of {', '.join(KEY_MEASURES)}."),
        (s.key_measure == "sphere" and s.dim < 2, "dim", f"dim must be at least 2 for keys on a sphere, got {s.dim}",
         "Pass dim=2 (--dim 2) or more."),
        (s.key_measure != "none" and (s.causal or s.keys > 0), "key_measure",
         "a measure of keys takes the place of fixed keys, and has no order for a causal mask",
         "Drop keys and causal, or key_measure."),
        (vector_of(s.key_mean, s.dim) is None, "key_mean",
         f"key_mean must have 1 or {s.dim} numbers, got {s.key_mean!r}",
         "Write a number, or one for each dimension: 1,-0.5."),
        (not _is_covariance(s.key_covariance, s.dim), "key_covariance",
         f"key_covariance must be a symmetric positive semidefinite matrix of size {s.dim}, got {s.key_covariance!r}",
         "Write a variance, one for each dimension (2,0.5), or all rows (2,0.6/0.6,0.5)."),
        (s.key_measure != "gaussian" and (s.key_mean, s.key_covariance) != ("0", "1"), "key_measure",
         f"key_mean and key_covariance belong to Gaussian keys, got key_measure {s.key_measure!r}",
         "Pass key_measure='gaussian' (--key-measure gaussian)."),
        (s.key_measure != "gaussian" and any(part in ("inverse_step", "recoloring") for part in parts), "contraction",
         f"contraction {s.contraction!r} needs Gaussian keys, got key_measure {s.key_measure!r}",
         "Pass key_measure='gaussian' (--key-measure gaussian)."),
        (matrix_of(s.qk_matrix, s.dim) is None, "qk_matrix",
         f"qk_matrix must be a matrix of size {s.dim}, got {s.qk_matrix!r}",
         "Write a number, a diagonal (2,0.5), or all rows (2,0.6/0.1,0.5)."),
        (s.ov_matrix != "qk" and matrix_of(s.ov_matrix, s.dim) is None, "ov_matrix",
         f"ov_matrix must be a matrix of size {s.dim} or 'qk', got {s.ov_matrix!r}",
         "Write a number, a diagonal (2,0.5), or all rows (2,0.6/0.1,0.5)."),
        (s.heads > 1 and (s.qk_matrix, s.ov_matrix) != ("1", "qk"), "heads",
         f"heads must be 1 with matrices, got {s.heads} heads", "Drop heads, or qk_matrix and ov_matrix."),
        (s.natural and (s.ov_matrix != "qk" or s.draws > 0 or s.heads > 1), "natural",
         "a natural-gradient step has no value matrix, no draws and one head",
         "Drop natural, or ov_matrix, draws and heads."),
        (s.causal and s.keys > 0, "keys", f"keys must be 0 with a causal mask, got {s.keys}",
         "Drop causal or keys: fixed keys have no order relative to the tokens."),
        (s.initial == "circle" and s.dim < 2, "dim", f"dim must be at least 2 for initial 'circle', got {s.dim}",
         "Pass dim=2 (--dim 2) or more."),
        (whitened and s.tokens <= s.dim, "tokens",
         f"tokens must be larger than dim for whitening, got {s.tokens} tokens and dim {s.dim}",
         "Increase tokens, or choose another contraction."),
    )  # fmt: skip


def _is_covariance(text: str, dim: int) -> bool:
    matrix = matrix_of(text, dim)
    if matrix is None or not bool((matrix == matrix.mT).all()):
        return False
    values = torch.linalg.eigvalsh(matrix)
    return bool(values[0] >= -1e-12 * values[-1].abs())


def _is_finite(value: float) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
