"""Time of the statistics of measures relative to common alternatives, on one thread."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from gradlogz import Empirical, Gaussian, Mixture, Sphere, dual
from timing import compare


def row(what: str, size: str, seconds: dict[str, float], ours: str, theirs: str) -> dict:
    return {
        "what": what,
        "size": size,
        "ours": ours,
        "alternative": theirs,
        "ratio": round(seconds[ours] / seconds[theirs], 2),
        "A/A": round(seconds["A/A"] / seconds[next(iter(seconds))], 2),
    }


def rows() -> list[dict]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    table = []
    for n, d in ((256, 64), (2048, 64)):
        q, k = torch.randn(1, 8, n, d), torch.randn(1, 8, n, d)
        h, eta, size = Empirical(k, validate=False), q / d**0.5, f"8 x {n} x {n} x {d}"
        seconds = compare(
            {"SDPA": lambda q=q, k=k: scaled_dot_product_attention(q, k, k), "mean": lambda h=h, e=eta: h.mean(e)}
        )
        table.append(row("attention", size, seconds, "mean", "SDPA"))

        def definition(k=k, eta=eta):
            return torch.logsumexp(eta @ k.mT, -1)

        seconds = compare({"logsumexp": definition, "log_normalizer": lambda h=h, e=eta: h.log_normalizer(e)})
        table.append(row("log normaliser", size, seconds, "log_normalizer", "logsumexp"))

    k, eta = torch.randn(512, 32), torch.randn(64, 32) / 32**0.5
    h = Empirical(k, validate=False)
    hessian = torch.func.vmap(torch.func.hessian(lambda e: torch.logsumexp(k @ e, 0)))
    seconds = compare({"torch.func.hessian": lambda: hessian(eta), "covariance": lambda: h.covariance(eta)})
    table.append(row("Fisher information", "64 x 512 x 32", seconds, "covariance", "torch.func.hessian"))

    points = torch.randn(32, 8, dtype=torch.float64)
    small, queries = Empirical(points), torch.randn(100, 8, dtype=torch.float64)
    means = small.mean(queries)

    def one_by_one():
        return [dual(small, u) for u in means]

    seconds = compare({"row by row": one_by_one, "batched": lambda: dual(small, means)}, rounds=3)
    table.append(row("dual of 100 means", "32 points, d = 8", seconds, "batched", "row by row"))

    sphere, etas = Sphere(64, torch.tensor(1.0)), 30 * torch.randn(1000, 64)
    gaussian = Gaussian.diagonal(torch.zeros(64), torch.ones(64))
    seconds = compare({"gaussian": lambda: gaussian.mean(etas), "sphere": lambda: sphere.mean(etas)})
    table.append(row("mean on the sphere", "1000 x 64", seconds, "sphere", "gaussian"))

    log_pi, mu = torch.full((128,), -torch.tensor(128.0).log()), torch.randn(128, 32)
    mixture, e = Mixture(log_pi, Gaussian.diagonal(mu, torch.ones(128, 32))), torch.randn(256, 32)
    plain = Empirical(mu)
    seconds = compare({"softmax": lambda: plain.mean(e), "mixture": lambda: mixture.mean(e)})
    table.append(row("keys with covariances", "256 x 128 x 32", seconds, "mixture", "softmax"))
    return table
