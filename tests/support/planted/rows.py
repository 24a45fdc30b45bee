"""Models with known attention rows, built from formulas without the package.

logits    = sharpness <z_i, A z_j> / |A|          z: tokens through the norm before the layer
tokens    embeddings are drawn, so that keys are sums of many independent numbers, close to Gaussian
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import transformers as tf

VOCABULARY = 96


def encoder(*, sharpness=1.0, heads=4, width=32, layers=2, seed=0):
    """Return a BERT whose logits have about this standard deviation within a sequence."""
    config = tf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=2 * width, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        max_position_embeddings=256, pad_token_id=0,
    )  # fmt: skip
    model = tf.BertModel._from_config(config, attn_implementation="sdpa").eval()
    drawn(model, seed)
    for layer in model.encoder.layer:
        part = layer.attention.self
        # <q, k> / sqrt(d) of independent q, k with entries of variance 1 has variance 1.
        part.query.weight.data.mul_(sharpness)
    return model


def decoder(*, sharpness=1.0, heads=4, width=32, layers=2, seed=0, key_heads=None):
    """Return a Llama, with rotary embeddings and a causal mask, whose logits have about this standard deviation."""
    config = tf.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads or heads, intermediate_size=2 * width, max_position_embeddings=256,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    drawn(model, seed)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.mul_(sharpness)
    return model


def drawn(model, seed):
    """Draw matrices with rows of length about 1, which preserve the scale of tokens; vectors are left unchanged."""
    source = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                size = 1.0 if "embed" in name else 1 / math.sqrt(p.shape[1])
                p.copy_(torch.from_numpy(size * source.standard_normal(p.shape)))
    return model


def with_sink(model, size):
    """Give the first token of an encoder a key on which all queries have a logit of about this size.

    The other n - 1 keys have nearly equal logits; a Gaussian has no such outlier.
    """
    with torch.no_grad():
        place = torch.zeros_like(model.embeddings.position_embeddings.weight[0])
        place[0] = 1e3
        model.embeddings.position_embeddings.weight[0] = place
        for layer in model.encoder.layer:
            part = layer.attention.self
            h, d = part.num_attention_heads, part.attention_head_size
            z = torch.nn.functional.layer_norm(place, place.shape)
            k = (part.key.weight @ z).reshape(h, d)
            part.query.weight.mul_(0.1)
            part.query.bias.copy_((size * math.sqrt(d) * k / k.square().sum(-1, keepdim=True)).flatten())
    return model


def with_loud_head(model, head=0, factor=12.0):
    """Give one head of an encoder far larger logits than the others, and so a far larger log normaliser."""
    with torch.no_grad():
        for layer in model.encoder.layer:
            part = layer.attention.self
            d = part.attention_head_size
            part.query.weight[head * d : (head + 1) * d] *= factor
    return model


class SureAttention(torch.nn.Module):
    """Causal attention that also returns the variance of the attended values in the residual stream."""

    def __init__(self, width, heads):
        super().__init__()
        self.project, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.num_heads = heads

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = self.project(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        later = torch.ones(n, n, dtype=torch.bool).triu(1)
        s = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
        p = (s - s.logsumexp(-1, keepdim=True)).exp()
        W = self.out.weight.T.reshape(self.num_heads, -1, width)
        there = v @ W  # [b, h, n, width]
        trace = (p @ there.square() - (p @ there).square()).sum((1, 3))
        return self.out(o.transpose(1, 2).reshape(b, n, width)), trace


class SureModel(torch.nn.Module):
    """A model that predicts the next token with a prescribed uncertainty.

    margin = 4 - unsure * standardised log spread + noise         loss = log(1 + (V - 1) exp(-margin))
    """

    def __init__(self, unsure, seed=0, width=32, heads=4):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, width)
        self.attention = SureAttention(width, heads)
        self.unsure, self.seed = unsure, seed
        drawn(self, seed)

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        update, trace = self.attention(x)
        x = x + update
        # A row with one visible key has no spread.
        spread = trace.clamp(min=1e-6).log()
        z = (spread - spread[:, 2:].mean()) / spread[:, 2:].std()
        source = torch.Generator().manual_seed(self.seed + int(input_ids.sum()))
        margin = 4 - self.unsure * z.clamp(-3, 3) + torch.randn(z.shape, generator=source)
        logits = margin.unsqueeze(-1) * torch.nn.functional.one_hot(input_ids.roll(-1, 1), VOCABULARY)
        return Output(logits.float(), x)


class Output(NamedTuple):
    logits: torch.Tensor
    stream: torch.Tensor


class DrawnKeys(torch.nn.Module):
    """Attention over keys of a prescribed distribution, independent of the queries.

    keys      rows of a table that draw(source, shape) fills, of variance 1 in every coordinate
    queries   Gaussian, so that logits have this variance
    """

    def __init__(self, draw, size, variance, heads=4, words=20_000, seed=0):
        super().__init__()
        source = np.random.default_rng(seed)
        width = heads * size
        self.embedding = torch.nn.Embedding(words, 2 * width)
        self.query, self.key, self.value = (torch.nn.Linear(2 * width, width, bias=False) for _ in range(3))
        self.out = torch.nn.Linear(width, 2 * width, bias=False)
        self.num_heads, self.scale = heads, math.sqrt(variance / size)
        keys = draw(source, (words, width))
        with torch.no_grad():
            queries = source.standard_normal((words, width))
            self.embedding.weight.copy_(torch.from_numpy(np.concatenate((queries, keys), 1)))
            both = torch.eye(2 * width)
            self.query.weight.copy_(both[:width])
            self.key.weight.copy_(both[width:])

    def forward(self, input_ids, attention_mask=None):
        x = self.embedding(input_ids)
        b, n, _ = x.shape
        q, k, v = (
            project(x).reshape(b, n, self.num_heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mask = None if attention_mask is None else attention_mask.bool()[:, None, None]
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return x + self.out(o.transpose(1, 2).reshape(b, n, -1))
