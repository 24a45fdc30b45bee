"""Maximum likelihood of two models of US GNP with regimes, float64, one thread, seconds of processor time.

Hamilton    autoregression of order 4 about a mean that switches [hamilton89]; its 32 tuples of modes are modes of `imm`
Lam         trend whose slope switches, and a stationary cycle [lam90]; `gpb2` is Kim's filter of it

gradlogz maximises with scipy's L-BFGS-B and the gradient of the log likelihood; statsmodels with its own `fit`, which
has no model of Lam's kind. "reported" is the time of statsmodels' pull request 2921, which was not merged, as reported
there (2016, the author's machine): 6.5 minutes and about one.
"""

import ast
import itertools
import time
import warnings
from pathlib import Path

import numpy as np
import statsmodels
import torch
from scipy.optimize import minimize
from statsmodels.tsa.regime_switching.markov_autoregression import MarkovAutoregression

from gradlogz import Prior, SwitchingModel, gpb2, imm
from timing import compare

F64 = torch.float64
REPORTED = {"Hamilton": 390.0, "Lam": 60.0}
TUPLES = torch.tensor(list(itertools.product(range(2), repeat=5)))  # s_t, s_{t-1}, ... s_{t-4}
FOLLOWS = torch.tensor([[float((j[1:] == i[:4]).all()) for j in TUPLES] for i in TUPLES], dtype=F64)


def growth() -> np.ndarray:
    """Return the growth of US GNP, per cent a quarter, 1951 to 1984, as the tests of statsmodels have it."""
    source = Path(statsmodels.__file__).parent / "tsa/regime_switching/tests/test_markov_autoregression.py"
    assignments = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.Assign)]
    return np.array(next(ast.literal_eval(a.value) for a in assignments if a.targets[0].id == "rgnp"))


def chain(logits: torch.Tensor) -> torch.Tensor:
    """Return the transition matrix of two modes from the logits of staying."""
    stay = logits.sigmoid()
    return torch.diag(stay) + torch.diag(1 - stay).flip(-1)


def hamilton(v: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the log likelihood; v: two logits, two means, the log variance and four coefficients."""
    T, mu, variance, phi = chain(v[:2]), torch.stack((v[2], v[2] + v[3].exp())), v[4].exp(), v[5:]
    means, one = mu[TUPLES], torch.ones(32, 1, 1, dtype=F64)
    lags = torch.stack([y[3 - i : len(y) - 1 - i] for i in range(4)], -1)
    d = means[:, 0] + (lags[:, None] - means[:, 1:]) @ phi
    moves = T[TUPLES[:, 1:], TUPLES[:, :-1]]
    stationary = torch.stack((1 - T[1, 1], 1 - T[0, 0])) / (2 - T.trace())
    start = stationary[TUPLES[:, 4]].log() + moves.log().sum(-1)
    model = SwitchingModel(
        FOLLOWS * moves[:, 0], one, 0 * one, 0 * one, variance * one, d=d.unsqueeze(-1), validate=False
    )
    prior = Prior(torch.zeros(1, dtype=F64), torch.zeros(1, 1, dtype=F64), start)
    return imm(model, y[4:].unsqueeze(-1), prior, fields=()).log_likelihood


def lam(v: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the log likelihood; v: two logits, two slopes, two coefficients and the log variance."""
    slopes, fixed = torch.stack((v[2], v[2] + v[3].exp())), torch.zeros(3, 3, dtype=F64)
    fixed[0, 0] = fixed[2, 1] = 1.0
    cycle = torch.stack(
        (torch.zeros_like(v[:3]), torch.cat((torch.zeros_like(v[:1]), v[4:6])), torch.zeros_like(v[:3]))
    )
    Q = torch.zeros(3, 3, dtype=F64)
    Q[1, 1] = 1.0
    model = SwitchingModel(
        chain(v[:2]),
        F=(fixed + cycle).expand(2, 3, 3),
        Q=(v[6].exp() * Q).expand(2, 3, 3),
        H=torch.tensor([[1.0, 1.0, 0.0]], dtype=F64).expand(2, 1, 3),
        R=torch.zeros(2, 1, 1, dtype=F64),
        b=torch.nn.functional.pad(slopes.unsqueeze(-1), (0, 2)),
        validate=False,
    )
    prior = Prior(torch.zeros(3, dtype=F64), torch.tensor([100.0, 1.0, 1.0], dtype=F64).diag())
    return gpb2(model, y.cumsum(0).unsqueeze(-1), prior, fields=()).log_likelihood


STARTS = {
    hamilton: [1.0, 2.0, -0.3, 0.4, -0.3, 0.0, 0.0, 0.0, 0.0],
    lam: [1.0, 2.0, -0.3, 0.4, 1.2, -0.3, 0.0],
}


def maximum(likelihood, y: torch.Tensor):
    """Return scipy's result."""

    def value(at):
        v = torch.tensor(at, requires_grad=True)
        total = likelihood(v, y)
        return -total.item(), -torch.autograd.grad(total, v)[0].numpy()

    return minimize(value, STARTS[likelihood], jac=True, method="L-BFGS-B", options={"maxiter": 300})


def rows() -> list[dict[str, object]]:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="statsmodels")
    data = growth()
    y = torch.tensor(data)
    theirs = MarkovAutoregression(data, k_regimes=2, order=4, switching_ar=False)
    assert abs(maximum(hamilton, y).fun + theirs.fit(disp=False).llf) < 1e-5
    table = []
    for name, likelihood in (("Hamilton", hamilton), ("Lam", lam)):
        result = maximum(likelihood, y)
        calls = {"gradlogz": lambda f=likelihood: maximum(f, y)}
        if name == "Hamilton":
            calls["statsmodels"] = lambda: theirs.fit(disp=False)
        seconds = compare(calls, rounds=5, clock=time.process_time)
        table.append(
            {
                "problem": name,
                "seconds": {who: round(t, 3) for who, t in seconds.items() if who != "A/A"},
                "A/A": round(seconds["A/A"] / seconds["gradlogz"], 3),
                "reported": REPORTED[name],
                "log likelihood": round(-result.fun, 4),
                "evaluations": int(result.nfev),
                "converged": bool(result.success),
            }
        )
    return table
