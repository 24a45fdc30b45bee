"""attend says what is wrong with its operands, masks and options."""

import torch

from gradlogz import attend, merge
from gradlogz.attention import Attention
from gradlogz.measures import PartialStatistics
from support.error_form import each_of, refused

q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 7, 8), torch.randn(2, 4, 7, 3)
against = "must broadcast against (2, 4, 5, 7), batch, heads, queries and keys"


class Exported(torch.nn.Module):
    def forward(self, q):
        return attend(q, q, q).output


def nested():
    return torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)], layout=torch.jagged)


ERRORS = [
    (TypeError, "attend: query must be a tensor; got list.", lambda: attend([[1.0]], k, v)),
    (TypeError, "attend: key must be a plain tensor; got a nested tensor.", lambda: attend(q, nested(), v)),
    (TypeError, "attend: query must be floating; got torch.int64.", lambda: attend(q.long(), k, v)),
    (ValueError, "attend: value must be [*b, tokens, features]; got shape (3,).", lambda: attend(q, k, v[0, 0, 0])),
    (
        TypeError,
        "attend: query, key and value must share one dtype; got query torch.float32, key torch.float64, "
        "value torch.float32.",
        lambda: attend(q, k.double(), v),
    ),
    (
        ValueError,
        "attend: query, key and value must be on one device; got query on cpu, key on meta, value on cpu.",
        lambda: attend(q, k.to("meta"), v),
    ),
    (
        ValueError,
        "attend: key must end in d=8 > 0, the dimension of query; got shape (2, 4, 7, 6).",
        lambda: attend(q, k[..., :6], v),
    ),
    (
        ValueError,
        "attend: value must hold n=7 tokens, one for each key; got shape (2, 4, 6, 3).",
        lambda: attend(q, k, v[:, :, :6]),
    ),
    (
        ValueError,
        "attend: key must hold at least one token; got shape (2, 4, 0, 8).",
        lambda: attend(q, k[:, :, :0], v[:, :, :0]),
    ),
    (
        ValueError,
        "attend: batch dimensions must broadcast; got query (2, 4, 5, 8), key (3, 4, 7, 8), value (2, 4, 7, 3).",
        lambda: attend(q, torch.randn(3, 4, 7, 8), v),
    ),
    (
        ValueError,
        "attend: heads must be equal; got 4, 2 and 2 heads of query, key and value.",
        lambda: attend(q, k[:, :2], v[:, :2]),
    ),
    (
        ValueError,
        "attend: key heads must divide query heads; got 4, 3 and 3 heads of query, key and value.",
        lambda: attend(q, k[:, :3], v[:, :3], enable_gqa=True),
    ),
    (ValueError, "attend: dropout_p must be in [0, 1); got 1.0.", lambda: attend(q, k, v, dropout_p=1.0)),
    (ValueError, "attend: softcap must be positive and finite; got 0.0.", lambda: attend(q, k, v, softcap=0.0)),
    (ValueError, "attend: scale must be a finite number; got nan.", lambda: attend(q, k, v, scale=float("nan"))),
    (ValueError, "attend: scale must be a finite number; got 'a'.", lambda: attend(q, k, v, scale="a")),
    (TypeError, "attend: scale must be a number; got a tensor.", lambda: attend(q, k, v, scale=torch.ones(()))),
    (TypeError, "attend: softcap must be a number; got a tensor.", lambda: attend(q, k, v, softcap=torch.ones(()))),
    (
        ValueError,
        "attend: sinks must be on cpu; got meta.",
        lambda: attend(q, k, v, sinks=torch.zeros(4, device="meta")),
    ),
    (
        ValueError,
        "attend: sinks must be [h] or [*b, h] with h=4 query heads; got shape (3, 4).",
        lambda: attend(q, k, v, sinks=torch.zeros(3, 4)),
    ),
    (
        ValueError,
        'attend: statistics must be "none", "scalar" or "moments"; got \'all\'.',
        lambda: attend(q, k, v, statistics="all"),
    ),
    (
        TypeError,
        "attend: attn_mask must be bool or floating; got torch.int64.",
        lambda: attend(q, k, v, attn_mask=torch.ones(5, 7).long()),
    ),
    (TypeError, "attend: attn_mask must be a tensor; got list.", lambda: attend(q, k, v, attn_mask=[[True]])),
    (
        ValueError,
        "attend: attn_mask must be on cpu; got meta.",
        lambda: attend(q, k, v, attn_mask=torch.ones(5, 7, device="meta")),
    ),
    (
        ValueError,
        f"attend: attn_mask {against}; got shape (7, 5).",
        lambda: attend(q, k, v, attn_mask=torch.ones(7, 5).bool()),
    ),
    (
        ValueError,
        f"attend: attn_mask or bias {against}; got shape (3, 4, 5, 7).",
        lambda: attend(q, k, v, bias=torch.ones(3, 4, 5, 7)),
    ),
    (
        TypeError,
        "attend: bias must be floating; got torch.bool.",
        lambda: attend(q, k, v, bias=torch.ones(5, 7).bool()),
    ),
    (TypeError, "attend: window must be a pair (left, right); got 3.", lambda: attend(q, k, v, window=3)),
    (
        ValueError,
        "attend: window must hold integers >= 0 or None; got (-1, 0).",
        lambda: attend(q, k, v, window=(-1, 0)),
    ),
    (
        TypeError,
        "attend: segments must be integers; got torch.float32.",
        lambda: attend(q, k, v, segments=torch.zeros(2, 7)),
    ),
    (
        ValueError,
        "attend: segments must broadcast against (2, 7), batch and keys; got shape (2, 5).",
        lambda: attend(q, k, v, segments=torch.zeros(2, 5).long()),
    ),
    (
        ValueError,
        "attend: segments must come with no more queries than keys; got 7 and 5.",
        lambda: attend(k, q, q, segments=torch.zeros(2, 5).long()),
    ),
    (
        TypeError,
        "attend: sinks must be a floating tensor; got torch.int64.",
        lambda: attend(q, k, v, sinks=torch.arange(4)),
    ),
    (
        ValueError,
        "attend: sinks must be [h] or [*b, h] with h=4 query heads; got shape (3,).",
        lambda: attend(q, k, v, sinks=torch.zeros(3)),
    ),
    (
        NotImplementedError,
        "attend: dropout_p must be 0 under torch.func.vmap; got a positive one.",
        lambda: torch.func.vmap(lambda q: attend(q, q, q, dropout_p=0.5).output, randomness="same")(q),
    ),
    (
        NotImplementedError,
        "attend: the call must not be exported; got torch.export, which knows only torch's own operators.",
        lambda: torch.export.export(Exported(), (q,), strict=False),
    ),
    (
        ValueError,
        "merge: both results must be of the same queries; got shapes (2, 4, 5, 3) and (2, 4, 4, 3).",
        lambda: merge(attend(q, k, v), attend(q[:, :, :4], k, v)),
    ),
    (
        TypeError,
        "merge: parts must be PartialStatistics or Attentions, of one kind; got Attention, PartialStatistics.",
        lambda: merge(Attention(q, q[..., 0]), PartialStatistics(q[..., 0], q)),
    ),
    (
        ValueError,
        "merge: both parts must be of the same queries and kind; got means of shapes (2, 3) and (3, 3).",
        lambda: merge(
            PartialStatistics(torch.zeros(2), torch.zeros(2, 3)), PartialStatistics(torch.zeros(3), torch.zeros(3, 3))
        ),
    ),
]


@each_of(ERRORS)
def test_errors_of_attend(refusal):
    refused(refusal)
