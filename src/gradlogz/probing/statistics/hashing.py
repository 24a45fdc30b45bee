"""Hashes of document names, equal on every machine: groups, bootstrap weights and sampled tokens.

    key          first 63 bits of blake2b(name)                                                 one for each document
    stream(s)_i  mix(s + i gamma)                                       output i of splitmix64 seeded with s  [steele14]
    group        3 bits of stream(key with its own seed)                                               0 to GROUPS - 1
    hash         63 bits of stream(key with another seed)_position                               one for each token
    weight       F^-1(stream(key with a third seed)_replicate / 2^63),  F of Poisson(1)          one for each replicate

No number depends on earlier draws. A document therefore has the same group and weights in every run, and results do not
depend on the order of a corpus or its division into shards.

Read next: sums.py (uses the weights), comoments.py (the groups), sample.py (the token hashes).
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
    """Return the key of a document: 63 bits of the blake2b hash of its name."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _GREATEST


def stream_seed(name: str, *numbers: int) -> int:
    """Return the seed of a random generator for one purpose, such as ("draw", seed, 3): 62 bits of a hash."""
    return hash_of(f"{name} {' '.join(map(str, numbers))}") >> 1


def group_of(key: int) -> int:
    """Return the group of a document, 0 to GROUPS - 1, independent of its weights and its token hashes."""
    return int(_stream(torch.tensor([key]), torch.zeros(1, dtype=torch.int64), "group") >> (_BITS - 3))


def token_hashes(keys: Int[Tensor, " b"], positions: Int[Tensor, "b n"]) -> Int[Tensor, "b n"]:
    """Return a uniform 63-bit number for each token of each document."""
    return _stream(keys.unsqueeze(-1), positions, "token")


def bootstrap_weights(keys: Int[Tensor, " b"]) -> Float[Tensor, "b r"]:
    """Return the count of each document in each replicate: Poisson(1), independent over documents and replicates.

    Poisson weights bootstrap a sample of unknown size  [hanley06]. They are computed by inversion of the distribution
    function in integers, exact to 2^-63.
    """
    replicates = torch.arange(REPLICATES, device=keys.device)
    uniform = _stream(keys.unsqueeze(-1), replicates, "weight")
    return torch.bucketize(uniform, _poisson(keys.device), right=True).double()


def _stream(keys: Tensor, index: Tensor, seed: str) -> Tensor:
    """Return 63 bits of output `index` of the generator seeded by each key."""
    return _mix(_mix(keys ^ _SEEDS[seed]) + index * _signed(0x9E3779B97F4A7C15)) & _GREATEST


def _mix(z: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64, a bijection of 64 bits in the wrapping arithmetic of int64."""
    z = z + _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shift to the right without sign extension."""
    return (z >> places) & ((1 << (64 - places)) - 1)


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


@lru_cache
def _poisson(device: torch.device) -> Tensor:
    """Return 2^63 F(0), 2^63 F(1), ... of Poisson(1), up to the last that differs from 2^63."""
    inverse_of_e = sum(Fraction((-1) ** k, math.factorial(k)) for k in range(40))
    mass = [inverse_of_e / math.factorial(k) for k in range(30)]
    steps = [int(sum(mass[: k + 1]) * 2**_BITS) for k in range(30)]
    return torch.tensor([step for step in steps if step < _GREATEST], device=device)
