"""Layers trained to their fixed points, what they are at rest, and the decisions (plan.md).

Read next: layers.py (the models), ../../src/gradlogz/dynamics/verdict.py (how the simulator classifies clouds).
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from gradlogz.dynamics import spectral_radius
from gradlogz.dynamics.observables import components

from ..intervals import Interval, student
from ..run_folders import environment
from ..tasks import generator_of
from ..training import TrainSettings, train
from ..workers import Workers
from .layers import ARMS, CENTRES, ArmName, CentreTask, RestingModel, RestSettings, Sets, drawn, oracle

STEPS, RANDOM_STARTS = 300, 3
RESTS, AGREES = 1e-4, 1e-3  # relative step of a set at rest; relative distance of equal fixed points
SHARE, COLLAPSE, COSINE, CLUSTERS = 0.9, 0.5, 0.05, 0.5


@dataclass(frozen=True)
class Settings:
    """Size of the experiment; sets: held-out sets."""

    seeds: int
    steps: int
    sets: int


FULL = Settings(seeds=5, steps=400, sets=32)
REDUCED = Settings(seeds=2, steps=60, sets=8)


def run(settings: Settings, folder: Path, workers: Workers = Workers()) -> dict[str, Any]:
    """Train all layers; return what they are at rest, and the decisions. Finished runs are read."""
    items = {f"{arm}-{seed}": (arm, seed) for arm in ARMS for seed in range(settings.seeds)}
    rows = workers.rows(partial(row_of, settings, folder), items, settings, folder)
    return {
        "answer": decisions(rows),
        "settings": asdict(settings),
        "environment": environment(torch.device("cpu")),
        "layers": rows,
    }


def row_of(settings: Settings, folder: Path, item: tuple[ArmName, int]) -> dict[str, Any]:
    """Row of one run."""
    arm, seed = item
    return trained(arm, seed, settings, folder / f"{arm}-{seed}")


def trained(arm: ArmName, seed: int, settings: Settings, folder: Path) -> dict[str, Any]:
    """Statistics of a trained layer and of the same layer before training."""
    model = RestingModel(RestSettings(arm), seed=seed)
    training = TrainSettings(
        steps=settings.steps, learning_rate=3e-3, weight_decay=0.0, warm_up=20, last_rate=0.01, record_every=100,
        save_every=100,
    )  # fmt: skip
    checkpoints = train(model, CentreTask(), training, seed=seed, folder=folder, device="cpu").checkpoints()
    measured = {}
    for name, step in (("untrained", min(checkpoints)), ("trained", max(checkpoints))):
        model.load_state_dict(load_file(checkpoints[step] / "model.safetensors"))
        measured[name] = at_rest(model.double(), settings.sets)
        model.float()
    return {"arm": arm, "seed": seed, **measured}


def at_rest(model: RestingModel, number: int) -> dict[str, float | None]:
    """Statistics of the plan on held-out sets, for a model in float64."""
    sets = Sets(*(t.double() if t.is_floating_point() else t for t in drawn(number, generator_of(0, 1))))
    with torch.no_grad():
        s = model.embedding(sets.tokens)
        f, start = model.layer.step(s), model.start(s)
        end = iterated(f, start)
        agree, generator = end.rests, generator_of(0, 2)
        for _ in range(RANDOM_STARTS):
            random = torch.randn(start.shape, generator=generator, dtype=torch.float64)
            other = iterated(f, random)
            distance = (other.state - end.state).norm(dim=(1, 2)) / end.state.norm(dim=(1, 2))
            agree = agree & other.rests & (distance < AGREES)
        radius = spectral_radius(f, end.state, tokens_interact=model.layer.tokens_interact, steps=50)
        targets = sets.centres.gather(1, sets.labels.unsqueeze(-1).expand(-1, -1, sets.centres.shape[-1]))
        risks = [(p - targets).square().sum(-1).mean() for p in (model.readout(end.state), sets.tokens, oracle(sets))]
        collapsed = None
        if model.layer.moving:
            free = iterated(model.without_injection().layer.step(s), end.state)
            collapsed = float((_clusters(free.state) == 1).double().mean())
        certified = float(model.layer.certificate(s).unique.double().mean()) if not model.layer.moving else None
        update = f(end.state)
    cosine, null = ascent(model, s, end.state)
    return {
        "relative error": float((risks[0] - risks[2]) / (risks[1] - risks[2])),
        "rests": float(end.rests.double().mean()),
        "last step": float(((update - end.state).norm(dim=(1, 2)) / end.state.norm(dim=(1, 2))).median()),
        "spectral radius": float(radius.median()),
        "one attractor": float(agree.double().mean()),
        "clusters": float(_clusters(end.state).double().mean()),
        "within centres": within_centres(end.state, sets.labels),
        "within centres, injection": within_centres(start, sets.labels),
        "collapsed without injection": collapsed,
        "certified": certified,
        "cosine": cosine,
        "cosine, permuted": null,
    }


class Ended(NamedTuple):
    """Tokens after the last step, and whether each set rests."""

    state: Tensor
    rests: Tensor


def iterated(f: Callable[[Tensor], Tensor], x: Tensor) -> Ended:
    """Apply a map STEPS times."""
    for _ in range(STEPS - 1):
        x = f(x)
    y = f(x)
    return Ended(y, (y - x).norm(dim=(1, 2)) < RESTS * y.norm(dim=(1, 2)))


def _clusters(x: Tensor) -> Tensor:
    """Number of connected components of each set."""
    labels, tokens = components(x)
    return (labels == torch.arange(tokens.shape[1])).sum(-1)


def within_centres(x: Tensor, labels: Tensor) -> float:
    """Share of the variance of tokens [b, n, d] that lies within the groups of their labels, mean over sets."""
    members = torch.nn.functional.one_hot(labels, CENTRES).to(x)
    means = (members.mT @ x) / members.sum(1).clamp(min=1).unsqueeze(-1)
    inside = (x - members @ means).square().sum((1, 2))
    return float((inside / (x - x.mean(1, keepdim=True)).square().sum((1, 2))).mean())


def ascent(model: RestingModel, s: Tensor, x: Tensor) -> tuple[float, float]:
    """Mean cosine of attention updates with gradients of the log normalisers, and with those of other tokens."""
    layer = model.layer
    context = x if layer.moving else s

    def heads(projection: torch.nn.Linear, tokens: Tensor) -> Tensor:
        return projection(tokens).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)

    k, v = (heads(projection, context).detach() for projection in (layer.k_proj, layer.v_proj))
    y = x.detach().requires_grad_()
    logits = heads(layer.q_proj, y) @ k.mT / k.shape[-1] ** 0.5
    (gradient,) = torch.autograd.grad(logits.logsumexp(-1).sum(), y)
    with torch.no_grad():
        update = layer.out_proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
        if layer.contraction == "layer_norm":  # steps along the sphere of centred tokens
            update, gradient = (_tangential(t, x) for t in (update, gradient))
        order = torch.randperm(x.shape[1], generator=generator_of(0, 3))
        other = gradient[:, order]
        if layer.contraction == "layer_norm":
            other = _tangential(other, x)
        cosines = [torch.cosine_similarity(update, g, dim=-1).mean() for g in (gradient, other)]
    return float(cosines[0]), float(cosines[1])


def _tangential(vectors: Tensor, x: Tensor) -> Tensor:
    centred = vectors - vectors.mean(-1, keepdim=True)
    direction = torch.nn.functional.normalize(x - x.mean(-1, keepdim=True), dim=-1)
    return centred - (centred * direction).sum(-1, keepdim=True) * direction


# Decisions ------------------------------------------------------------------------------------------------------------


def decisions(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Decide the hypotheses of the plan."""
    answer: dict[str, Any] = {
        "status": "final" if len({row["seed"] for row in rows}) >= 5 else "preliminary: fewer than 5 seeds"
    }
    for arm in ARMS:
        layers = [row["trained"] for row in rows if row["arm"] == arm]

        def interval(name: str, layers: list[dict[str, Any]] = layers) -> Interval:
            return student([layer[name] for layer in layers])

        excess = student([layer["cosine"] - layer["cosine, permuted"] for layer in layers])
        clusters = interval("clusters")
        inside = clusters.low > CENTRES - CLUSTERS and clusters.high < CENTRES + CLUSTERS
        outside = clusters.high < CENTRES - CLUSTERS or clusters.low > CENTRES + CLUSTERS
        of_arm = {
            "H1 rests": _above(interval("rests"), SHARE),
            "H2 one attractor": _above(interval("one attractor"), SHARE),
            "H3 three clusters": {
                "verdict": "supported" if inside else "refuted" if outside else "inconclusive",
                "value": clusters._asdict(),
            },
            "H5 ascent at rest": _above(excess, COSINE),
            "relative error": interval("relative error")._asdict(),
        }
        if arm == "shrinkage":
            of_arm["H6 certificate"] = _above(interval("certified"), SHARE)
        else:
            of_arm["H4 collapse without injection"] = _above(interval("collapsed without injection"), COLLAPSE)
        answer[arm] = of_arm
    first, third, fifth = (
        answer["deq"][name]["verdict"] for name in ("H1 rests", "H3 three clusters", "H5 ascent at rest")
    )
    verdict = "inconclusive"
    if first == "refuted":
        verdict = "no rest"
    elif first == "supported" and "refuted" in (third, fifth):
        verdict = "of another kind"
    elif first == third == fifth == "supported":
        verdict = "of the theory's kind"
    return answer | {"The trained fixed point is": verdict}


def _above(interval: Interval, bound: float) -> dict[str, Any]:
    verdict = "supported" if interval.low > bound else "refuted" if interval.high < bound else "inconclusive"
    return {"verdict": verdict, "value": interval._asdict()}
