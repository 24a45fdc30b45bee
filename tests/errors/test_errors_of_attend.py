"""attend says what is wrong with its operands, masks and options."""

import torch
from torch import distributed
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.nn.attention.flex_attention import create_block_mask

from gradlogz import attend, merge
from gradlogz.attention import Attention, attend_varlen, ring_attend, ring_positions
from gradlogz.measures import PartialStatistics
from support.error_form import each_of, refused

q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 3)


class Exported(torch.nn.Module):
    def forward(self, q):
        return attend(q, q, q).output


def nested():
    return torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)


def block_mask(*lengths):
    return create_block_mask(lambda _b, _h, query, key: query >= key, None, None, *lengths, device="cpu")


def in_context_parallel():
    from torch.distributed.tensor.experimental import context_parallel

    def call():
        part, mesh = q.clone(), distributed.init_device_mesh("cpu", (1,))
        try:
            with context_parallel(mesh, buffers=[part], buffer_seq_dims=[2]):
                attend(part, part, part)
        finally:
            attend(part, part, part)  # as before

    in_a_ring_of_one(call)


def in_a_ring_of_one(call):
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        call()
    finally:
        distributed.destroy_process_group()


tokens, ends = torch.randn(6, 2, 8), torch.tensor([0, 2, 6])

ERRORS = [
    (ValueError, "attend: fields", "names", lambda: attend(q, k, v, fields=("entropy",))),
    (ValueError, "attend: fields", "names", lambda: attend(q, k, v, fields="max_key")),
    (ValueError, "attend_varlen: query", "heads", lambda: attend_varlen(q, tokens, tokens, ends, ends)),
    (TypeError, "attend_varlen: cu_seqlens_q", "int32", lambda: attend_varlen(*[tokens] * 3, ends.float(), ends)),
    (ValueError, "attend_varlen: cu_seqlens_k", "shape", lambda: attend_varlen(*[tokens] * 3, ends, ends[None])),
    (ValueError, "attend_varlen: cu_seqlens_k", "documents", lambda: attend_varlen(*[tokens] * 3, ends, ends[1:])),
    (
        NotImplementedError,
        "attend_varlen: cu_seqlens_q",
        "is_causal",
        lambda: attend_varlen(*[tokens] * 3, ends, torch.tensor([0, 3, 6]), is_causal=True),
    ),
    (ValueError, "attend: attn_mask", "queries", lambda: attend(q, k, v, attn_mask=block_mask(5, 8))),
    (NotImplementedError, "attend: key", "context_parallel", in_context_parallel),
    (TypeError, "ring_attend: query", "a tensor", lambda: ring_attend([[1.0]], k, v)),
    (RuntimeError, "ring_attend: group", "process group", lambda: ring_attend(q, k, v)),
    (
        ValueError,
        "ring_attend: key",
        "equal parts",
        lambda: in_a_ring_of_one(lambda: ring_attend(q, k, v, is_causal=True)),
    ),
    (ValueError, "ring_attend: placement", "zigzag", lambda: ring_attend(q, k, v, placement="striped")),
    (NotImplementedError, "ring_attend: dropout_p", "0.1", lambda: ring_attend(q, k, v, dropout_p=0.1)),
    (
        NotImplementedError,
        "ring_attend: attn_mask",
        "local keys",
        lambda: ring_attend(q, k, v, attn_mask=torch.ones(5, 7).bool()),
    ),
    (
        NotImplementedError,
        "ring_attend: attn_mask",
        "float32",
        lambda: ring_attend(q, k, v, attn_mask=torch.zeros(7)),
    ),
    (ValueError, "ring_attend: segments", "local keys", lambda: ring_attend(q, k, v, segments=torch.zeros(5).long())),
    (
        ValueError,
        "ring_attend: key",
        "even",
        lambda: in_a_ring_of_one(lambda: ring_attend(k, k, v, placement="zigzag")),
    ),
    (RuntimeError, "ring_positions: group", "process group", lambda: ring_positions(8)),
    (ValueError, "ring_positions: placement", "zigzag", lambda: ring_positions(8, placement="striped")),
    (
        ValueError,
        "ring_positions: tokens",
        "multiple of 2",
        lambda: in_a_ring_of_one(lambda: ring_positions(7, placement="zigzag")),
    ),
    (TypeError, "attend: query", "a tensor", lambda: attend([[1.0]], k, v)),
    (TypeError, "attend: key", "tensor", lambda: attend(q, nested(), v)),
    (TypeError, "attend: query", "floating", lambda: attend(q.long(), k, v)),
    (ValueError, "attend: value", "features", lambda: attend(q, k, v[0, 0, 0])),
    (
        TypeError,
        "attend: query",
        "share",
        lambda: attend(q, k.double(), v),
    ),
    (
        ValueError,
        "attend: query",
        "device",
        lambda: attend(q, k.to("meta"), v),
    ),
    (
        ValueError,
        "attend: key",
        "dimension",
        lambda: attend(q, k[..., :6], v),
    ),
    (
        ValueError,
        "attend: value",
        "tokens",
        lambda: attend(q, k, v[:, :, :6]),
    ),
    (
        ValueError,
        "attend: key",
        "token",
        lambda: attend(q, k[:, :, :0], v[:, :, :0]),
    ),
    (
        ValueError,
        "attend: query",
        "broadcast",
        lambda: attend(q, torch.randn(3, 4, 7, 8), v),
    ),
    (
        ValueError,
        "attend: key",
        "equal",
        lambda: attend(q, k[:, :2], v[:, :2]),
    ),
    (
        ValueError,
        "attend: key",
        "divide",
        lambda: attend(q, k[:, :3], v[:, :3], enable_gqa=True),
    ),
    (ValueError, "attend: dropout_p", "in", lambda: attend(q, k, v, dropout_p=1.0)),
    (ValueError, "attend: softcap", "positive", lambda: attend(q, k, v, softcap=0.0)),
    (ValueError, "attend: scale", "finite", lambda: attend(q, k, v, scale=float("nan"))),
    (ValueError, "attend: scale", "finite", lambda: attend(q, k, v, scale="a")),
    (TypeError, "attend: scale", "a number", lambda: attend(q, k, v, scale=torch.ones(()))),
    (TypeError, "attend: softcap", "a number", lambda: attend(q, k, v, softcap=torch.ones(()))),
    (
        ValueError,
        "attend: sinks",
        "on meta",
        lambda: attend(q, k, v, sinks=torch.zeros(4, device="meta")),
    ),
    (
        ValueError,
        "attend: sinks",
        "query",
        lambda: attend(q, k, v, sinks=torch.zeros(3, 4)),
    ),
    (
        ValueError,
        "attend: statistics",
        "moments",
        lambda: attend(q, k, v, statistics="all"),
    ),
    (
        TypeError,
        "attend: attn_mask",
        "floating",
        lambda: attend(q, k, v, attn_mask=torch.ones(5, 7).long()),
    ),
    (TypeError, "attend: attn_mask", "a tensor", lambda: attend(q, k, v, attn_mask=[[True]])),
    (ValueError, "attend: attn_mask", "queries", lambda: attend(q, k, v, attn_mask=causal_lower_right(5, 8))),
    (
        NotImplementedError,
        "attend: attn_mask",
        "combined",
        lambda: attend(q, k, v, attn_mask=causal_upper_left(5, 7), window=(2, 0)),
    ),
    (
        ValueError,
        "attend: attn_mask",
        "on meta",
        lambda: attend(q, k, v, attn_mask=torch.ones(5, 7, device="meta")),
    ),
    (
        ValueError,
        "attend: attn_mask",
        "broadcast",
        lambda: attend(q, k, v, attn_mask=torch.ones(7, 5).bool()),
    ),
    (
        ValueError,
        "attend: attn_mask or bias",
        "broadcast",
        lambda: attend(q, k, v, bias=torch.ones(3, 4, 5, 7)),
    ),
    (
        TypeError,
        "attend: bias",
        "floating",
        lambda: attend(q, k, v, bias=torch.ones(5, 7).bool()),
    ),
    (TypeError, "attend: window", "right", lambda: attend(q, k, v, window=3)),
    (
        ValueError,
        "attend: window",
        "integers",
        lambda: attend(q, k, v, window=(-1, 0)),
    ),
    (
        TypeError,
        "attend: segments",
        "integers",
        lambda: attend(q, k, v, segments=torch.zeros(2, 7)),
    ),
    (
        ValueError,
        "attend: segments",
        "broadcast",
        lambda: attend(q, k, v, segments=torch.zeros(2, 5).long()),
    ),
    (
        ValueError,
        "attend: segments",
        "queries",
        lambda: attend(k, q, q, segments=torch.zeros(2, 5).long()),
    ),
    (
        TypeError,
        "attend: sinks",
        "floating",
        lambda: attend(q, k, v, sinks=torch.arange(4)),
    ),
    (
        ValueError,
        "attend: sinks",
        "query",
        lambda: attend(q, k, v, sinks=torch.zeros(3)),
    ),
    (
        NotImplementedError,
        "attend: dropout_p",
        "vmap",
        lambda: torch.func.vmap(lambda q: attend(q, q, q, dropout_p=0.5).output, randomness="same")(q),
    ),
    (
        NotImplementedError,
        "attend: None",
        "exported",
        lambda: torch.export.export(Exported(), (q,), strict=False),
    ),
    (
        ValueError,
        "merge: other",
        "queries",
        lambda: merge(attend(q, k, v), attend(q[:, :, :4], k, v)),
    ),
    (
        TypeError,
        "merge: parts",
        "PartialStatistics",
        lambda: merge(Attention(q, q[..., 0]), PartialStatistics(q[..., 0], q)),
    ),
    (
        ValueError,
        "merge: other",
        "queries",
        lambda: merge(
            PartialStatistics(torch.zeros(2), torch.zeros(2, 3)), PartialStatistics(torch.zeros(3), torch.zeros(3, 3))
        ),
    ),
]


@each_of(ERRORS)
def test_errors_of_attend(refusal):
    refused(refusal)
