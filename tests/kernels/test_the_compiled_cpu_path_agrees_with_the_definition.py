"""The compiled CPU path is the definition, in float32: every shape, every way of hiding keys, forward and backward.

The definition is scoring.logits and reference.statistics in float64; gradients are those of torch.autograd through it.
"""

import os
import platform
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from gradlogz.kernels.attention import reference
from gradlogz.kernels.attention.scoring import Block, Scoring, Sight, logits, visible

cpu = pytest.importorskip("gradlogz.kernels.attention.cpu", reason="numba is not installed")
workers = pytest.importorskip("gradlogz.kernels.workers", reason="numba is not installed")

#         b  h  hk    m    n   d    v
SHAPES = [
    (1, 1, 1, 1, 1, 1, 1),
    (1, 2, 2, 5, 7, 3, 2),
    (2, 4, 2, 1, 5000, 24, 19),
    (1, 2, 1, 6, 50, 64, 64),
    (2, 4, 2, 100, 130, 16, 8),
    (1, 2, 1, 257, 300, 33, 65),
    (1, 2, 2, 64, 96, 64, 64),
    (2, 3, 1, 150, 97, 24, 193),
]
BANDS = {
    "everything": (None, None),
    "causal": (None, 0),
    "strictly before": (None, -1),
    "window": (20, 3),
    "from the left": (17, None),
}


def sights(b, h, m, n):
    """Each way of hiding and weighing keys, and some together."""
    dense = torch.rand(b, h, m, n) > 0.3
    bias = torch.randn(1, h, m, n).masked_fill(torch.rand(1, h, m, n) > 0.9, -torch.inf)
    packed = torch.arange(n).mul(5).div(n, rounding_mode="floor").unsqueeze(0)
    at_or_after_the_first = {"segments": packed, "shuffled segments": torch.randint(3, (b, n))} if m <= n else {}
    return {
        "nothing": Sight(),
        "mask": Sight(mask=dense),
        "mask of one row": Sight(mask=dense[:1, :1]),
        "key padding": Sight(mask=(torch.arange(n) < 0.6 * n).expand(b, 1, 1, n)),
        "bias": Sight(bias=bias),
        "bias of keys": Sight(bias=torch.randn(b, 1, 1, n)),
        "bias of batches and mask of heads": Sight(bias=torch.randn(b, 1, m, n), mask=dense[:1]),
        **{name: Sight(segments=segments) for name, segments in at_or_after_the_first.items()},
    }


def inputs(b, h, hk, m, n, d, v):
    return torch.randn(b, h, m, d), torch.randn(b, hk, n, d), torch.randn(b, hk, n, v)


def definition(query, key, value, sight, scoring):
    m, n = query.shape[2], key.shape[2]
    seen = visible(sight, scoring, Block(0, m, 0, n), m, n, query.device)
    bias = None if sight.bias is None else sight.bias.double()
    return reference.statistics(logits(query.double(), key.double(), bias, seen, scoring), value.double())


def agree(actual, expected, tolerance, name=""):
    """Equal infinities and NaN, and an error small against the largest number."""
    assert actual.shape == expected.shape, name
    finite = expected.isfinite()
    assert torch.equal(actual.isnan(), expected.isnan()), name
    assert torch.equal(actual[~finite].nan_to_num(), expected[~finite].float().nan_to_num()), name
    error = (actual[finite] - expected[finite]).abs().max() if finite.any() else torch.tensor(0.0)
    assert error <= tolerance * (1 + expected[finite].abs().amax() if finite.any() else 1), (name, error)


def check_forward(query, key, value, sight, scoring, tolerance=2e-6):
    actual = cpu.forward(query, key, value, sight, scoring)
    expected = definition(query, key, value, sight, scoring)
    for name in reference.Statistics._fields:
        agree(getattr(actual, name), getattr(expected, name), tolerance, name)
    assert (actual.entropy >= 0).all()
    assert (actual.logit_variance >= 0).all()


def gradients(query, key, value, sight, scoring, *, curved):
    """Of a random loss in all statistics: what `backward` says, and what autograd says of the definition."""
    forward = cpu.forward(query, key, value, sight, scoring)
    grad_output = torch.randn_like(forward.output)
    by_G, by_H, by_V = torch.randn(3, *forward.log_normalizer.shape)
    if not curved:
        by_H, by_V = torch.zeros_like(by_H), torch.zeros_like(by_V)
    c0 = by_G - (grad_output * forward.output).sum(-1) - by_V * forward.logit_variance
    G = forward.log_normalizer.masked_fill(forward.log_normalizer == -torch.inf, torch.inf)
    mean = forward.log_normalizer - forward.entropy
    c1, c2 = (2 * by_V - by_H, by_V) if curved else (None, None)
    needs_bias = sight.bias is not None
    actual = cpu.backward(query, key, value, sight, scoring, G, mean, grad_output, c0, c1, c2, needs_bias=needs_bias)
    q, k, v = (tensor.double().requires_grad_() for tensor in (query, key, value))
    bias = sight.bias.double().requires_grad_() if needs_bias else None
    o, G, H, V, _ = definition(q, k, v, sight._replace(bias=bias), scoring)
    loss = (grad_output * o).sum() + (by_G * G.masked_fill(G == -torch.inf, 0.0) + by_H * H + by_V * V).sum()
    expected = torch.autograd.grad(loss, (q, k, v, bias) if needs_bias else (q, k, v))
    return zip(("query", "key", "value", "bias"), actual, expected, strict=False)


def check_backward(*arguments, curved, tolerance=3e-6):
    for name, actual, expected in gradients(*arguments, curved=curved):
        agree(actual, expected, tolerance, name)


@pytest.fixture
def threads(monkeypatch):
    """Sets their number, for problems of any size."""
    monkeypatch.setattr(cpu, "WORTH_A_THREAD", 0)
    cpu._forward_plan.cache_clear()
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
    cpu._forward_plan.cache_clear()


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_statistic_is_that_of_the_definition(shape, band):
    b, h, _, m, n, d, _ = shape
    for softcap, sight in product((None, 3.0), sights(b, h, m, n).values()):
        check_forward(*inputs(*shape), sight, Scoring(d**-0.5, softcap, *BANDS[band]))


@pytest.mark.parametrize("band", BANDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_gradient_is_that_of_the_definition(shape, band):
    b, h, _, m, n, d, _ = shape
    for softcap, sight in product((None, 3.0), sights(b, h, m, n).values()):
        check_backward(*inputs(*shape), sight, Scoring(d**-0.5, softcap, *BANDS[band]), curved=softcap is None)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradients_of_output_and_log_normalizer_alone(shape):
    check_backward(*inputs(*shape), Sight(), Scoring(0.3), curved=False)


def test_rows_without_keys_have_no_mass_and_no_gradient():
    query, key, value = inputs(1, 2, 1, 70, 50, 8, 5)
    hidden = torch.zeros(1, 1, 70, 50, dtype=torch.bool)
    for sight in (Sight(mask=hidden), Sight(bias=torch.full((1, 1, 1, 50), -torch.inf))):
        statistics = cpu.forward(query, key, value, sight, Scoring(1.0))
        assert (statistics.output == 0).all()
        assert (statistics.log_normalizer == -torch.inf).all()
        assert (statistics.entropy == 0).all()
        assert (statistics.logit_variance == 0).all()
        assert (statistics.max_logit == -torch.inf).all()
        for name, actual, _ in gradients(query, key, value, sight, Scoring(1.0), curved=True):
            assert (actual == 0).all(), name


@pytest.mark.parametrize("size", [1e4, 1e8, 1e32, -1e4, -1e8, -1e32, -3e38])
def test_logits_of_any_size_are_exact_to_their_own_rounding(size):
    query, key, value = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 200, 4), torch.randn(1, 1, 200, 2)
    bias = torch.full((1, 1, 1, 200), size)
    step = 2.0**-6 if abs(size) < 1e5 else 0.0
    bias += step * torch.randint(64, (200,))
    check_forward(query, key, value, Sight(bias=bias), Scoring(1.0))
    top = cpu.forward(query, key, value, Sight(bias=bias), Scoring(1.0)).max_logit
    assert (top == bias.amax()).all()


def test_logits_far_apart_leave_one_key():
    query, key, value = inputs(1, 2, 2, 80, 300, 16, 16)
    check_forward(100 * query, 100 * key, value, Sight(), Scoring(1.0))
    # Weights are exp(s - G), and near 1e4 the log normaliser itself is rounded by 5e-4.
    check_backward(30 * query, 30 * key, value, Sight(), Scoring(1.0), curved=False, tolerance=5e-4)


def test_a_maximum_that_rises_from_tile_to_tile_rescales_all_sums():
    query, key, value = (
        torch.ones(1, 1, 5, 1),
        torch.linspace(-40, 40, 1000).reshape(1, 1, -1, 1),
        torch.randn(1, 1, 1000, 3),
    )
    check_forward(query, key, value, Sight(), Scoring(1.0))
    check_forward(query, key.flip(2), value, Sight(), Scoring(1.0))
    check_forward(query, key, value, Sight(), Scoring(0.01))


def test_long_rows_keep_their_digits():
    query, key, value = inputs(1, 1, 1, 20, 20000, 64, 4)
    actual = cpu.forward(query, key, value, Sight(), Scoring(0.125))
    expected = definition(query, key, value, Sight(), Scoring(0.125))
    assert ((actual.logit_variance - expected.logit_variance) / expected.logit_variance).abs().max() < 2e-6
    assert (actual.entropy - expected.entropy).abs().max() < 4e-6
    assert (actual.log_normalizer - expected.log_normalizer).abs().max() < 4e-6


def test_nan_stays_in_its_row_or_reaches_all_who_see_it():
    query, key, value = inputs(1, 1, 1, 70, 130, 8, 8)
    query[0, 0, 3, 2] = torch.nan
    for scoring in (Scoring(0.3), Scoring(0.3, 2.0)):
        statistics = cpu.forward(query, key, value, Sight(), scoring)
        for statistic in statistics:
            rows = statistic[0, 0].reshape(70, -1).isnan()
            assert rows[3].all()
            assert rows.sum() == rows.shape[1]
    query, key, value = inputs(1, 1, 1, 130, 130, 8, 8)
    key[0, 0, 50, 1] = torch.nan
    statistics = cpu.forward(query, key, value, Sight(), Scoring(0.3, right=0))
    assert statistics.log_normalizer[0, 0, 50:].isnan().all()
    assert statistics.log_normalizer[0, 0, :50].isfinite().all()
    seen = torch.arange(130) != 50
    assert cpu.forward(query, key, value, Sight(mask=seen.expand(1, 1, 1, 130)), Scoring(0.3)).output.isfinite().all()


def test_strides_of_every_kind():
    query = torch.randn(2, 70, 3, 8).transpose(1, 2)
    key = torch.randn(1, 1, 8, 90).mT.expand(2, 3, 90, 8)
    value = torch.randn(2, 3, 90, 20)[..., ::2]
    for sight in (
        Sight(mask=(torch.rand(90, 70) > 0.5).mT.expand(2, 1, 70, 90)),
        Sight(bias=torch.randn(1, 3, 1, 90).expand(2, 3, 70, 90)),
        Sight(bias=torch.randn(2, 1, 70, 1).expand(2, 3, 70, 90), segments=torch.randint(2, (90, 2)).mT.int()),
    ):
        check_forward(query, key, value, sight, Scoring(0.3))
        check_backward(query, key, value, sight, Scoring(0.3), curved=True)


@pytest.mark.parametrize("hk", [1, 2, 4])
def test_results_are_the_same_to_the_bit_for_any_number_of_threads(threads, monkeypatch, hk):
    query, key, value = inputs(1, 4, hk, 900, 1000, 24, 40)
    rows = torch.randn(3, 1, 4, 900)
    results = []
    ours = workers.Team()
    ours.torch_parallel = None
    for number, team in [(1, workers.Team()), (2, workers.Team()), (3, workers.Team()), (2, ours), (3, ours)]:
        monkeypatch.setattr(cpu, "team", lambda team=team: team)
        threads(number)
        for scoring in (Scoring(0.2), Scoring(0.2, right=0), Scoring(0.2, None, 100, 50)):
            sight = Sight(bias=torch.linspace(0, 1, 1000).expand(1, 1, 1, 1000))
            forward = cpu.forward(query, key, value, sight, scoring)
            G, mean = forward.log_normalizer, forward.log_normalizer - forward.entropy
            backward = cpu.backward(query, key, value, sight, scoring, G, mean, forward.output, *rows, needs_bias=True)
            results.append((*forward, *backward))
    for i, result in enumerate(results):
        for x, y in zip(result, results[i % 3], strict=True):
            assert torch.equal(x, y)


def said_by_another_process(code, **environment):
    """What a process with the names of this file says before it ends."""
    here = Path(__file__)
    start = f"import os, sys, torch; sys.path.insert(0, {str(here.parent)!r}); from {here.stem} import *\n"
    environment = {**os.environ, **environment}
    run = [sys.executable, "-c", start + code]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False, timeout=300)
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("processor", "features", "width"), [("haswell", "+avx,+avx2,+fma,+sse2", 8), ("x86-64", "+sse2", 4)]
)
def test_narrower_vectors_agree_too(processor, features, width, tmp_path):
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("not a machine with such processors")
    code = """
torch.set_num_threads(1)
for shape in SHAPES[2:4]:
    b, h, _, m, n, d, _ = shape
    for sight in sights(b, h, m, n).values():
        check_forward(*inputs(*shape), sight, Scoring(d**-0.5, None, None, 0))
        check_backward(*inputs(*shape), sight, Scoring(d**-0.5, 3.0), curved=False)
print("agrees with vectors of", cpu.WIDTH)
"""
    said = said_by_another_process(
        code, NUMBA_CPU_NAME=processor, NUMBA_CPU_FEATURES=features, NUMBA_CACHE_DIR=str(tmp_path)
    )
    assert f"agrees with vectors of {width}" in said


def test_a_forked_child_has_threads_of_its_own():
    if not hasattr(os, "fork"):
        pytest.skip("no fork here")
    code = """
torch.set_num_threads(2)
cpu.WORTH_A_THREAD = 0
problem = (*inputs(*SHAPES[2]), Sight(), Scoring(1.0))
before = cpu.forward(*problem).output
child = os.fork()
if child == 0:
    print("same" if torch.equal(before, cpu.forward(*problem).output) else "different", flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert said_by_another_process(code).startswith("same")


def test_no_folder_to_keep_compiled_code_is_no_error(monkeypatch):
    def refuse(*arguments, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: "compiled without"

    monkeypatch.setattr(workers, "cfunc", refuse)
    assert workers.compile_worker(lambda plan: None) == "compiled without"
