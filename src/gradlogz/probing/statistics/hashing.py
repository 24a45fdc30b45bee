"""Names become numbers that are the same on every machine: which group, which weights, which tokens are drawn.

    key          first 63 bits of blake2b(name)                                         one for each document
    stream(s)_i  mix(s + i gamma)                                       output i of splitmix64 seeded with s  [steele14]
    group        3 bits of stream(key with a seed of its own)                                          0 to GROUPS - 1
    hash         63 bits of stream(key with another seed)_position                               one for each token
    weight       F^-1(stream(key with a third seed)_replicate / 2^63),  F of Poisson(1)          one for each replicate

Nothing is drawn in turn, so that a document has the same group and weights whenever and wherever it is met, and
results do not depend on how a corpus was cut or in which order it was read.

Read next: sums.py (the weights at work), comoments.py (the groups), sample.py (the hashes).
"""

import hashlib
import math
from fractions import Fraction
from functools import lru_cache

import torch

from ..._typing import Float, Int, Tensor

GROUPS = 8
REPLICATES = 200

_BITS = 63
_GREATEST = 2**_BITS - 1
_SEEDS = {"group": 0x243F6A8885A308D3, "token": 0x13198A2E03707344, "weight": 0x24111F35AD82A1B1}


def hash_of(name: str) -> int:
    """The key of a document: 63 bits of the blake2b hash of its name."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _GREATEST


def group_of(key: int) -> int:
    """The group of a document, 0 to GROUPS - 1, independent of its weights and of the hashes of its tokens."""
    return int(_stream(torch.tensor([key]), torch.zeros(1, dtype=torch.int64), "group") >> (_BITS - 3))


def token_hashes(keys: Int[Tensor, " b"], positions: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """A uniform number of 63 bits for each token of each document."""
    return _stream(keys.unsqueeze(-1), positions, "token")


def bootstrap_weights(keys: Int[Tensor, " b"]) -> Float[Tensor, "b r"]:
    """How often each replicate draws each document: Poisson(1), independent over documents and replicates.

    Poisson weights are the bootstrap of a sample whose size is not known beforehand  [hanley06]; they are inverted
    from the distribution function in integers, exact to 2^-63.
    """
    replicates = torch.arange(REPLICATES, device=keys.device)
    uniform = _stream(keys.unsqueeze(-1), replicates, "weight")
    return torch.bucketize(uniform, _poisson(keys.device), right=True).double()


def _stream(keys: Tensor, index: Tensor, seed: str) -> Tensor:
    """63 bits of output `index` of the generator that each key seeds."""
    return _mix(_mix(keys ^ _SEEDS[seed]) + index * _signed(0x9E3779B97F4A7C15)) & _GREATEST


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64, a bijection of 64 bits in the wrapping arithmetic of int64."""
    z = z + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, places: int) -> Tensor:
    """A shift to the right that lets no sign bits in."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@lru_cache
def _poisson(device: torch.device) -> Tensor:
    """F(0), F(1), ... of Poisson(1) times 2^63, as far as they differ from 2^63."""
    inverse_of_e = sum(Fraction((-1) ** k, math.factorial(k)) for k in range(40))
    mass = [inverse_of_e / math.factorial(k) for k in range(30)]
    steps = [int(sum(mass[: k + 1]) * 2**_BITS) for k in range(30)]
    return torch.tensor([step for step in steps if step < _GREATEST], device=device)
