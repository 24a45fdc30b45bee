"""Check of a GPU kernel at its first use: two small problems, compared with the definition in float64.

Compilers have made wrong code of such kernels: Triton 3.4 to 3.7 miscompiles some pipelined products on Hopper GPUs
(triton issues 9433 and 11047). A kernel that fails is not used, and a warning says so once; the next one in dispatch.py
takes its place. What has passed is remembered beside Triton's compiled kernels, for this GPU, driver, version of Triton
and source of the kernel.
"""

import hashlib
import json
import tempfile
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..._typing import Tensor
from .reference import Gradients, Statistics, statistics
from .scoring import Block, Scoring, Sight, logits, visible

# Of the largest entry. Rounding stays ten times below, wrong code far above.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 6e-2}


class Kind(NamedTuple):
    """Kind of calls that are checked together: they use the same kernels up to edges of tiles."""

    kernel: str
    backward: bool
    dtype: torch.dtype
    key_size: int
    value_size: int
    masks: str  # "dense" (bias, mask), "segments" or none
    few_queries: bool
    square: bool  # as many queries as keys


def passes(kernel: Any, kind: Kind, device: torch.device) -> bool:
    """Return whether a kernel is right on two problems of a kind; during the capture of a graph, assume so."""
    return device.type != "cuda" or torch.cuda.is_current_stream_capturing() or _checked(kernel, kind, device)


@cache
def _checked(kernel: Any, kind: Kind, device: torch.device) -> bool:
    name = _name(kernel, kind, device)
    if name in _remembered():
        return True
    with torch.no_grad(), torch.cuda.device(device):
        right = all(_is_right(kernel, kind, device, causal=causal) for causal in (False, True))
    if right:
        _remember(name)
    else:
        warnings.warn(
            f"The kernel {kind.kernel} gives wrong results with {torch.cuda.get_device_name(device)} and the installed "
            f"Triton ({kind}), so that attend uses a slower one. Another version of Triton may help.",
            RuntimeWarning,
            stacklevel=2,
        )
    return right


def _is_right(kernel: Any, kind: Kind, device: torch.device, *, causal: bool) -> bool:
    generator = torch.Generator("cpu").manual_seed(int(causal))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(device, kind.dtype)

    # Whole tiles without an edge, then ragged ones, with heads that share keys.
    b, h, hk, m, n = (2, 4, 2, 200, 333) if causal else (1, 2, 2, 256, 256)
    m = 3 if kind.few_queries else n if kind.square else m
    query, key, value = draw(b, h, m, kind.key_size), draw(b, hk, n, kind.key_size), draw(b, hk, n, kind.value_size)
    sight = Sight()
    if kind.masks == "dense":  # each query sees at least one key
        hidden = torch.rand(b, 1, m, n, generator=generator, device="cpu") > 0.8
        sight = Sight(mask=(~hidden | torch.eye(m, n, dtype=torch.bool, device="cpu")).to(device))
    elif kind.masks == "segments":
        sight = Sight(segments=(torch.arange(n, device=device) // 70).unsqueeze(0))
    scoring = Scoring(2 * kind.key_size**-0.5, right=0 if causal else None)
    definition = _definition(query, key, value, sight, scoring)
    if not kind.backward:
        result = kernel.forward(query, key, value, sight, scoring, statistics=True)
        return _agree(result, definition, kind.dtype)
    result = Statistics(definition.output.to(kind.dtype), *(row.float() for row in definition[1:]))
    grad_G, grad_H, grad_V = draw(3, b, h, m).float()
    gradients = Gradients(draw(*result.output.shape), grad_G, grad_H, grad_V, None)
    per_row = kernel.coefficients(result, gradients)
    grads = kernel.backward(query, key, value, sight, scoring, per_row, gradients.output, needs_bias=False)[:3]
    return _agree(grads, _defined_gradients(query, key, value, sight, scoring, gradients), kind.dtype)


def _definition(query: Tensor, key: Tensor, value: Tensor, sight: Sight, scoring: Scoring) -> Statistics:
    return statistics(_logits(query, key, sight, scoring), value.double())


def _defined_gradients(
    query: Tensor, key: Tensor, value: Tensor, sight: Sight, scoring: Scoring, gradients: Gradients
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, written out: torch records nothing inside an operator."""
    s = _logits(query, key, sight, scoring)
    output, G, H, V, _ = statistics(s, value.double())
    go, gG, gH, gV = (torch.zeros_like(G) if g is None else g.double() for g in gradients[:4])
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(t.double().repeat_interleave(group, 1) for t in (key, value))
    p = (s - G.unsqueeze(-1)).exp()
    y = (s - (G - H).unsqueeze(-1)).masked_fill(s == -torch.inf, 0.0)
    c0 = gG - (go * output).sum(-1) - gV * V
    ds = p * (go @ v.mT + c0.unsqueeze(-1) + y * ((2 * gV - gH).unsqueeze(-1) + gV.unsqueeze(-1) * y))
    shared = (scoring.scale * ds.mT @ q, p.mT @ go)
    return scoring.scale * ds @ k, *(t.unflatten(1, (-1, group)).sum(2) for t in shared)


def _logits(query: Tensor, key: Tensor, sight: Sight, scoring: Scoring) -> Tensor:
    m, n = query.shape[2], key.shape[2]
    visible_keys = visible(sight, scoring, Block(0, m, 0, n), m, n, query.device)
    return logits(query.double(), key.double(), None, visible_keys, scoring)


def _agree(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> bool:
    """Compare finite numbers by their largest difference; a NaN agrees with nothing."""
    for one, other in zip(results, expected, strict=True):
        if not bool(((one.double() - other).abs().max() <= TOLERANCE[dtype] * (1 + other.abs().max())).item()):
            return False
    return True


# What has passed ------------------------------------------------------------------------------------------------------


def _name(kernel: Any, kind: Kind, device: torch.device) -> str:
    """Name of a kind with all that its machine code depends on."""
    import triton

    # All kernels of the folder: the backward pass of each is that of gpu.py.
    source = b"".join(path.read_bytes() for path in sorted(Path(kernel.__file__).parent.glob("*.py")))
    parts = (
        torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), torch.version.cuda,
        triton.__version__, _ptxas_version(), hashlib.sha256(source).hexdigest(), *kind,
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _ptxas_version() -> str:
    from triton import knobs

    return knobs.nvidia.ptxas.version


def _file() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir) / "gradlogz_checked_kernels.json"


def _remembered() -> list[str]:
    try:
        names = json.loads(_file().read_text())
    except (OSError, ValueError):
        return []
    return names if isinstance(names, list) else []


def _remember(name: str) -> None:
    """Add a name to the file; where it cannot be written, the next process checks again."""
    path = _file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump([*_remembered(), name], file)
        Path(file.name).replace(path)
    except OSError:
        return
