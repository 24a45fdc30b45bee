"""Record of a trained layer in the form of the simulator.

Read next: layer_dynamics.py (reads it from a model), layer_iteration.py (repeats it).
"""

from collections.abc import Iterable
from typing import NamedTuple

from ..._progress import Progress
from ..._typing import Float, Tensor
from ...dynamics.evolution import Ascent, Placement, Trajectory, evolve
from ...dynamics.layer_norms import LayerNorms


class LayerDynamics(NamedTuple):
    """A layer of a model in the form of `evolve`.

    Attributes:
        layer: name of the attention layer.
        ascent: attention and feed-forward map.
        norms: norms of the two sublayers.
        placement: placement of the norms.
        length: number of tokens of the sequence on which one step was compared with the layer.
        error: largest difference of that step from the layer, relative to the largest coordinate.
    """

    layer: str
    ascent: Ascent
    norms: LayerNorms
    placement: Placement
    length: int
    error: float

    def evolve(
        self,
        cloud: Float[Tensor, "*b n D"] | Trajectory,
        *,
        steps: int,
        observe: Iterable[str] = (),
        every: int = 1,
        progress: Progress = False,
    ) -> Trajectory:
        """Apply the layer `steps` times to clouds [*b, n, D], each a sequence of n tokens, and record observables."""
        return evolve(
            cloud, self.ascent, contraction=self.norms, placement=self.placement, steps=steps, observe=observe,
            every=every, progress=progress,
        )  # fmt: skip
