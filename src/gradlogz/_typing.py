"""The dimension key of every annotated shape in this package.

b   batch            h   heads           m   queries         n   points
d   dimension        e   new dimension   v   value dimension
t   time             k   components, modes
s   state            o   observation     l   layers          p   side of a matrix

*b  any number of leading batch dimensions
*bm the batch of a measure followed by any number of query dimensions
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

__all__ = ["Bool", "Float", "Int", "Tensor"]
