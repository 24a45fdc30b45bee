"""Models whose rows of attention are known: built by formulas alone, with nothing of the package.

logits    = sharpness <z_i, A z_j> / |A|          z: tokens through the norm before the layer
tokens    embeddings are drawn, so that keys are sums of many independent numbers, close to Gaussian
"""

import math

import numpy as np
import torch
import transformers as tf

VOCABULARY = 96


def encoder(*, sharpness=1.0, heads=4, width=32, layers=2, seed=0):
    """A BERT whose logits have about this standard deviation within a sequence."""
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
    """A Llama, with rotations and a causal mask, of the same kind."""
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
    """Matrices with rows of length about 1, so that they keep the size of a token; vectors as they are."""
    source = np.random.default_rng(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim >= 2:
                size = 1.0 if "embed" in name else 1 / math.sqrt(p.shape[1])
                p.copy_(torch.from_numpy(size * source.standard_normal(p.shape)))
    return model


def with_sink(model, size):
    """An encoder in which the first token has a key of its own, on which all queries have a logit of about this size.

    n - 1 keys that hardly differ in their logits and one that does: no Gaussian has such a key.
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
