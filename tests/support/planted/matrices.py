"""Models with prescribed weight matrices: small GPT-2s and BERTs made with numpy, without the library.

Row vectors: q = z W_q, and the output of a head is sum_j a_j z_j W_v W_o.
"""

import numpy as np
import torch
import transformers as tf

VOCABULARY, WIDTH, HEADS, LAYERS = 512, 32, 4, 2
SIZE = WIDTH // HEADS


def centring(width=WIDTH):
    return np.eye(width) - np.ones((width, width)) / width


def random_heads(generator, heads=HEADS, width=WIDTH):
    """W_q, W_k, W_v [heads, width, size] and W_o [heads, size, width], independent."""
    size = width // heads
    Wq, Wk, Wv = (generator.normal(size=(heads, width, size)) / np.sqrt(width) for _ in range(3))
    return [1.5 * Wq, 1.5 * Wk, Wv, generator.normal(size=(heads, size, width)) / np.sqrt(width)]


def free(generator, gain):
    """Return heads with independent matrices."""
    return random_heads(generator)


def tied(generator, gain, strength=1.0, step=0.3):
    """W_v W_o = step W_k W_qᵀ behind a norm with this gain, up to noise: their cosine is about `strength`."""
    Wq, Wk, Wv, noise = random_heads(generator, width=len(gain))
    gradient = Wq.transpose(0, 2, 1) * gain @ centring(len(gain))
    along = step * gradient / np.linalg.norm(gradient, axis=(1, 2), keepdims=True)
    across = step * noise / np.linalg.norm(noise, axis=(1, 2), keepdims=True)
    Wo = strength * along + np.sqrt(1 - strength**2) * across
    return [Wq, Wk, Wk if strength > 0 else Wv, 4 * Wo]


def gains(generator, width=WIDTH):
    return generator.uniform(0.5, 1.5, width)


def gpt2(seed, heads, gain=None, layers=LAYERS, activation="gelu_new", width=WIDTH):
    """A GPT-2 with heads(generator, gain) in every layer; gains are random unless given."""
    generator = np.random.default_rng(seed)
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=width, n_layer=layers, n_head=HEADS, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, bos_token_id=1, eos_token_id=2, activation_function=activation,
    )  # fmt: skip
    model = tf.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        put(model.transformer.wte.weight, generator.normal(size=(VOCABULARY, width)))
        for block in model.transformer.h:
            g = gains(generator, width) if gain is None else gain
            Wq, Wk, Wv, Wo = heads(generator, g)
            put(block.ln_1.weight, g)
            put(block.ln_1.bias, 0.1 * generator.normal(size=width))
            put(block.attn.c_attn.weight, np.concatenate([side(W) for W in (Wq, Wk, Wv)], 1))
            put(block.attn.c_attn.bias, 0.1 * generator.normal(size=3 * width))
            put(block.attn.c_proj.weight, Wo.reshape(width, width))
    return model


def bend(model, seed, linear, scale=2.0):
    """Give every feed-forward sublayer of a GPT-2 with relu the map (linear wz + (1 - linear) |wz|) V.

    Units come in pairs w, -w: relu(wz) - relu(-wz) = wz is linear, relu(wz) + relu(-wz) = |wz| has no linear part for
    tokens that are symmetric about 0.
    """
    generator = np.random.default_rng(seed)
    half = 2 * WIDTH
    with torch.no_grad():
        for block in model.transformer.h:
            W = scale * generator.normal(size=(WIDTH, half)) / np.sqrt(WIDTH)
            V = generator.normal(size=(half, WIDTH)) / np.sqrt(half)
            put(block.mlp.c_fc.weight, np.concatenate([W, -W], 1))
            put(block.mlp.c_fc.bias, np.zeros(2 * half))
            put(block.mlp.c_proj.weight, np.concatenate([V, (1 - 2 * linear) * V], 0))
    return model


def bert(seed, heads, layers=LAYERS):
    """A BERT with heads(generator, 1) in every layer: a post-norm model, whose layers read the stream itself."""
    generator = np.random.default_rng(seed)
    config = tf.BertConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, num_hidden_layers=layers, num_attention_heads=HEADS,
        intermediate_size=48, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=64,
    )  # fmt: skip
    model = tf.BertModel(config, add_pooling_layer=False).eval()
    with torch.no_grad():
        for layer in model.encoder.layer:
            Wq, Wk, Wv, Wo = heads(generator, np.ones(WIDTH))
            part = layer.attention.self
            for linear, W in ((part.query, Wq), (part.key, Wk), (part.value, Wv)):
                put(linear.weight, side(W).T)
            put(layer.attention.output.dense.weight, Wo.reshape(WIDTH, WIDTH).T)
            put(layer.attention.output.LayerNorm.weight, gains(generator))
            put(layer.output.LayerNorm.weight, gains(generator))
    return model


def side(W):
    """Concatenate heads: [heads, width, size] as [width, heads * size]."""
    return W.transpose(1, 0, 2).reshape(W.shape[1], -1)


def put(parameter, values):
    parameter.copy_(torch.as_tensor(values, dtype=parameter.dtype))


def alike(generator, gain, strength=1.0):
    """Return heads with W_k = W_q up to noise: at strength 1 the QK matrix W_q W_qᵀ is symmetric and positive."""
    Wq, noise, Wv, Wo = random_heads(generator, width=len(gain))
    return [Wq, strength * Wq + np.sqrt(1 - strength**2) * noise, Wv, Wo]


def crossed(generator, gain):
    """Return heads with W_k = W_q J, J antisymmetric, so that the QK matrix is antisymmetric."""
    Wq, _, Wv, Wo = random_heads(generator)
    J = generator.normal(size=(HEADS, SIZE, SIZE))
    return [Wq, Wq @ (J - J.transpose(0, 2, 1)) / SIZE, Wv, Wo]


def spreading(generator, gain, step):
    """Return heads that attend to their own token and add step times it: the cloud grows, or shrinks if step < 0."""
    Wq, _, _, _ = random_heads(generator)
    identity = np.eye(WIDTH).reshape(WIDTH, HEADS, SIZE).transpose(1, 0, 2)
    return [1.5 * Wq, 1.5 * Wq, identity, step * identity.transpose(0, 2, 1)]


def on_token_axes(seed, strength, power=1.0, width=256):
    """A GPT-2 whose QK matrices follow the power of the token covariance, with W_k = strength W_q + noise."""
    size = width // HEADS

    def heads(generator, gain):
        _, _, Wv, Wo = random_heads(generator, width=width)
        lengths = np.arange(1, size + 1)[:, None] ** -power
        Wq, noise = np.zeros((2, HEADS, width, size))
        for W in (*Wq, *noise):
            W[:size] = lengths * np.linalg.qr(generator.normal(size=(size, size)))[0]
        return [Wq, strength * Wq + np.sqrt(1 - strength**2) * noise, Wv, 0.05 * Wo]

    return with_principal_axes(gpt2(seed, heads, gain=np.ones(width), width=width))


def matching(generator, gain, strength=1.0, scale=0.5):
    """Return heads that attend to tokens like their own: W_k = W_q up to noise, at a moderate scale of logits."""
    Wq, Wk, Wv, Wo = alike(generator, gain, strength)
    return [scale * Wq, Wk, Wv, Wo]


def on_principal_axes(seed, scale=1.0, width=64):
    """A GPT-2 whose W_q and W_k are independent, both on the leading principal axes of its tokens, never trained.

    The standard deviation of token coordinate i is proportional to 1 / i; heads read the first coordinates, each side
    through a random rotation of its own. There are no positions, and sublayers change tokens little.
    """
    size = width // HEADS

    def heads(generator, gain):
        _, _, Wv, Wo = random_heads(generator, width=width)
        Wq, Wk = np.zeros((2, HEADS, width, size))
        for W in (*Wq, *Wk):
            W[:size] = np.linalg.qr(generator.normal(size=(size, size)))[0]
        return [scale * Wq, Wk, Wv, 0.05 * Wo]

    return with_principal_axes(gpt2(seed, heads, gain=np.ones(width), width=width))


def with_principal_axes(model):
    """The GPT-2, with tokens of standard deviation 1 / i in coordinate i, whose sublayers change them little."""
    width = model.config.n_embd
    spread = 1 / np.arange(1, width + 1)
    with torch.no_grad():
        part = model.transformer
        put(part.wte.weight, part.wte.weight.numpy() * spread * np.sqrt(width) / np.linalg.norm(spread))
        part.wpe.weight.zero_()
        for block in part.h:
            block.ln_1.bias.zero_()
            block.attn.c_attn.bias.zero_()
            block.mlp.c_proj.weight.zero_()
    return model
