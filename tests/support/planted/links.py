"""Models whose queries are a linear link of their own keys, to a planted degree, built from formulas alone.

keys      k = x A, x standard normal, A any matrix:  covariance K = AᵀA
link      of Gaussian keys: k -> k K^-1
queries   logits (s k K^-1 + sqrt(1 - s²) y A^-T), y a standard normal vector independent of x

The logits <q, k'> have variance logits² over independent keys, of which the link explains s² with the sign of s.
"""

import math

import numpy as np
import torch

HEADS, SIZE = 4, 16


class LinkedQueries(torch.nn.Module):
    """One attention layer over words with drawn keys and queries."""

    def __init__(self, strength, logits=1.0, words=4000, seed=0):
        super().__init__()
        source = np.random.default_rng(seed)
        width = HEADS * SIZE
        self.embedding = torch.nn.Embedding(words, 2 * width)
        self.query, self.key, self.value = (torch.nn.Linear(2 * width, width, bias=False) for _ in range(3))
        self.out = torch.nn.Linear(width, 2 * width, bias=False)
        self.num_heads = HEADS
        x, y = source.standard_normal((2, HEADS, words, SIZE))
        A = source.standard_normal((HEADS, SIZE, SIZE)) + 2 * np.eye(SIZE)
        dual = np.linalg.inv(A).transpose(0, 2, 1)
        keys = x @ A
        queries = (strength * x + math.sqrt(1 - strength**2) * y) @ dual * (logits / math.sqrt(SIZE))
        table = np.concatenate([t.transpose(1, 0, 2).reshape(words, width) for t in (queries, keys)], 1)
        with torch.no_grad():
            self.embedding.weight.copy_(torch.from_numpy(table))
            both = torch.eye(2 * width)
            self.query.weight.copy_(both[:width])
            self.key.weight.copy_(both[width:])

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        b, n, _ = x.shape
        q, k, v = (t(x).reshape(b, n, HEADS, SIZE).transpose(1, 2) for t in (self.query, self.key, self.value))
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return x + self.out(o.transpose(1, 2).reshape(b, n, -1))
