"""Work of each process of a ring that shares a sequence, and the results it saves."""

import contextlib

import torch
from torch import distributed, nn

import gradlogz
from gradlogz import attend
from gradlogz.attention import ring_attend, ring_positions
from gradlogz.attention.layers.heads import split
from gradlogz.kernels.attention import operator

QUIET = gradlogz.attention.Thresholds(None, None, None)

TOKENS = 24  # zigzag placement over 2 and 3 processes: a multiple of 4 and 6
DOCUMENTS = torch.tensor([[0] * 7 + [1] * 14 + [2] * 3, [3, 3, 5, 3] * 6])  # the second sequence has interleaved ones
KEPT = torch.arange(TOKENS) < torch.tensor([[24], [10]])  # the second sequence is padded: whole ranks see nothing
ZIGZAG = {"placement": "zigzag"}
CASES = {
    "full": {},
    "causal": {"is_causal": True},
    "grouped": {"is_causal": True, "enable_gqa": True, "scale": 0.7},
    "moments": {"statistics": "moments"},
    "causal moments": {"is_causal": True, "enable_gqa": True, "statistics": "moments"},
    "output alone": {"is_causal": True, "statistics": "none"},
    "sharp": {"is_causal": True, "scale": 40.0},
    "capped": {"is_causal": True, "softcap": 0.5, "scale": 3.0},
    "sliding": {"is_causal": True, "window": (3, 0), "enable_gqa": True},
    "window": {"window": (5, 2)},
    "wide window": {"window": (16, 10), "statistics": "moments"},
    "one-sided window": {"window": (None, 3)},
    "documents": {"is_causal": True, "segments": DOCUMENTS},
    "documents both ways": {"segments": DOCUMENTS[:1]},
    "documents in windows": {"segments": DOCUMENTS, "window": (9, 5), "enable_gqa": True},
    "padding": {"attn_mask": KEPT[:, None, None]},
    "padded documents": {"is_causal": True, "attn_mask": KEPT[:, None, None], "segments": DOCUMENTS},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.3, -1.0, 2.0, -torch.inf], dtype=torch.float64)},
    "sinks of padding": {"attn_mask": KEPT[:, None, None], "sinks": torch.ones(2, 4).double(), "statistics": "moments"},
    "zigzag": {"is_causal": True, **ZIGZAG},
    "zigzag full": ZIGZAG,
    "zigzag window": {"window": (7, 3), **ZIGZAG},
    "zigzag documents": {
        "is_causal": True, "window": (9, 0), "segments": DOCUMENTS, "attn_mask": KEPT[:, None, None],
        "statistics": "moments", **ZIGZAG,
    },
}  # fmt: skip


def sequence(case):
    """Return query, key and value of the complete sequence, equal in all processes."""
    g = torch.Generator().manual_seed(1)
    heads = (4, 2, 2) if "enable_gqa" in CASES[case] else (4, 4, 4)
    tensors = [
        torch.randn(2, h, TOKENS, d, generator=g, dtype=torch.float64) for h, d in zip(heads, (5, 5, 3), strict=True)
    ]
    if case == "full":  # cross-attention: more keys than queries
        tensors[1], tensors[2] = (torch.cat([t, 0.5 * t.roll(1, 0)], 2) for t in tensors[1:])
    return [t.requires_grad_() for t in tensors]


def loss(result, here=slice(None)):
    """Sum of all fields with random coefficients; `here` are the tokens of the rows."""
    total = torch.zeros((), dtype=torch.float64)
    for number, field in enumerate(result):
        if field is not None:
            g = torch.Generator().manual_seed(10 + number)
            shape = (*field.shape[:2], TOKENS, *field.shape[3:])
            total = total + (torch.randn(shape, generator=g, dtype=torch.float64)[:, :, here] * field).sum()
    return total


def places(rank, processes, placement="contiguous"):
    """Positions of the tokens of a rank, among those of the whole sequence."""
    chunks = torch.arange(TOKENS).chunk(processes if placement == "contiguous" else 2 * processes)
    return chunks[rank] if placement == "contiguous" else torch.cat([chunks[rank], chunks[-1 - rank]])


def part(tensor, rank, processes, placement="contiguous"):
    """Tokens of a rank in a tensor [b, h, tokens, d]; twice as many where there are twice as many keys."""
    if tensor.shape[2] > TOKENS:
        return tensor.detach().chunk(processes, 2)[rank].clone().requires_grad_()
    return tensor.detach()[:, :, places(rank, processes, placement)].requires_grad_()


def local_options(options, here):
    """Options of a case, with masks and segments of the tokens of a rank."""
    cut = {name: options[name][..., here] for name in ("attn_mask", "segments") if name in options}
    if "sinks" in options:
        cut["sinks"] = options["sinks"].clone().requires_grad_()
    return options | cut


def ring_rank(rank, processes, port, folder):
    """Save results and gradients of the local part in every case, alone and in the group of the last two ranks."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=processes)
    results = {}
    for case, options in CASES.items():
        results[case] = results_of_part(case, rank, processes, options)
    results["refusal"] = refusal(rank)
    results["equal logits"] = gradient_with_equal_logits()
    results["autocast"] = under_autocast()
    results["kept"] = numbers_kept_for_backward(rank, processes)
    results["observed"] = observed(rank, processes)
    for case in MONITORED:
        results["monitored", case] = trained(case, rank, processes), trained(case, rank, processes, monitored=False)
    if processes == 3:
        pair = distributed.new_group([1, 2])
        if rank > 0:
            results["pair"] = results_of_part("causal", rank - 1, 2, {"is_causal": True, "group": pair})
    torch.save(results, f"{folder}/{rank}.pt")
    distributed.barrier()  # a process that leaves early takes the threads of the other down
    distributed.destroy_process_group()


def results_of_part(case, rank, processes, options):
    placement = options.get("placement", "contiguous")
    tensors = [part(t, rank, processes, placement) for t in sequence(case)]
    here = places(rank, processes, placement)
    options = local_options(options, here)
    result = ring_attend(*tensors, **options)
    if "sinks" in options:
        tensors.append(options["sinks"])
    gradients = torch.autograd.grad(loss(result, here), tensors)
    positions = ring_positions(TOKENS, placement=placement, group=options.get("group"))
    assert torch.equal(positions, here)
    return tuple(None if t is None else t.detach() for t in result), gradients


def refusal(rank):
    tokens = torch.ones(1, 1, 3 + rank, 2)
    try:
        ring_attend(tokens, tokens, tokens)
    except ValueError as error:
        return str(error)


def gradient_with_equal_logits():
    """Gradient of the largest logit with respect to keys that are the same in all processes."""
    q, k = torch.ones(1, 1, 1, 2, dtype=torch.float64), torch.ones(1, 1, 3, 2, dtype=torch.float64).requires_grad_()
    ring_attend(q, k, k, scale=1.0).max_logit.sum().backward()
    return k.grad


def under_autocast():
    """Dtypes of output, log normaliser and gradient under autocast, for float32 inputs."""
    q = torch.ones(1, 1, 3, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = ring_attend(q, q, q)
    result.output.sum().backward()
    return result.output.dtype, result.log_normalizer.dtype, q.grad.dtype


def numbers_kept_for_backward(rank, processes):
    """Numbers that autograd keeps between the passes, and those of the local operands and results."""
    q, k, v = (part(t, rank, processes) for t in sequence("causal"))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()), lambda _: None):
        result = ring_attend(q, k, v)
    local = [
        q,
        k,
        v,
        *(t for t in result if t is not None),
        result.max_logit,
    ]  # the last: the block of the largest logit
    return sum(kept), sum(t.numel() for t in local)


class RingAttention(nn.Module):
    """Attention of a model by `attend`, or by `ring_attend` on the part of a process."""

    def __init__(self, case):
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.weights = nn.ParameterList(torch.randn(8, 8, generator=g, dtype=torch.float64) for _ in range(3))
        self.case = case

    def forward(self, x, rank=0, processes=None):
        q, k, v = (split(x @ w, 2) for w in self.weights)
        options = MONITORED[self.case]
        if processes is None:
            return attend(q, k, v, **{name: value for name, value in options.items() if name != "placement"}).output
        here = places(rank, processes, options.get("placement", "contiguous"))
        return ring_attend(q, k, v, **local_options(options, here)).output


MONITORED = {
    "full": {},
    "sliding": {"is_causal": True, "window": (3, 0), "scale": 1.0},
    "window": {"window": (5, 20)},
    "documents": {"is_causal": True, "segments": DOCUMENTS[:1].to(torch.int8), "softcap": 2.0},
    "padding": {"attn_mask": KEPT[:, None, None], "is_causal": True},
    "left padding": {"attn_mask": ~KEPT[:, None, None].roll(5, -1), "is_causal": True},
    "sinks": {"is_causal": True, "sinks": torch.tensor([0.3, -1.0], dtype=torch.float64)},
    "zigzag": {"is_causal": True, **ZIGZAG},
    "zigzag documents": {"is_causal": True, "segments": DOCUMENTS[:1], "attn_mask": KEPT[:, None, None], **ZIGZAG},
    "nothing asked": {"is_causal": True, "statistics": "none"},
}


def tokens():
    return torch.randn(2, TOKENS, 8, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def trained(case, rank=0, processes=None, monitored=True):
    """Train two steps; return the weights, the records of the last row, and the number of calls of a kernel."""
    model = nn.Sequential(RingAttention(case))[0]
    place = MONITORED[case].get("placement", "contiguous")
    here = slice(None) if processes is None else places(rank, processes, place)
    optimizer, calls, forward = torch.optim.SGD(model.parameters(), 1e-2), [], operator.dispatch.forward
    operator.dispatch.forward = lambda *a, **o: calls.append(1) or forward(*a, **o)
    context = gradlogz.monitor(model, every=1, thresholds=QUIET) if monitored else contextlib.nullcontext()
    try:
        with context as m:
            for _ in range(2):
                model(tokens()[:, here], rank, processes).square().sum().backward()
                if processes is not None:
                    for p in model.parameters():
                        distributed.all_reduce(p.grad)
                optimizer.step()
                optimizer.zero_grad()
    finally:
        operator.dispatch.forward = forward
    return [p.detach() for p in model.parameters()], m.row().records() if monitored else None, len(calls)


def observed(rank, processes):
    """Statistics of the rows of a rank under `observe`, and whether they have gradients."""
    model = nn.Sequential(RingAttention("nothing asked"))
    here = places(rank, processes)
    with gradlogz.observe(model[0]) as observation:
        model[0](tokens()[:, here], rank, processes)
    entropy = observation[""].entropy
    return entropy.detach(), entropy.requires_grad
