"""A z-loss on the statistics of a compiled Hugging Face model: one graph, and the loss and gradients of `observe`."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import gradlogz
from gradlogz.attention import collect, unregister
from support.tiny_models import tiny


def loss_of(logits, results):
    """Loss with a z-loss on the rows that see a key, and an entropy bonus, in every layer."""
    squares = [torch.where(a.seen, a.log_normalizer, 0.0).square().sum() / a.seen.sum() for a in results]
    return logits.square().mean() + 0.1 * sum(squares) - 0.01 * sum(a.entropy.mean() for a in results)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("inside", [True, False])
def test_a_compiled_z_loss_is_that_of_observe(name, inside):
    model, batch, _ = tiny("masked" if name == "bert" else "causal", name)
    batch["attention_mask"][1, :3] = 0  # left padding
    with gradlogz.observe(model) as observed:
        expected = loss_of(model(**batch, use_cache=False).logits[:, 3:], list(observed.values()))
    expected.backward()
    expected_gradients = gradients(model)
    gradlogz.register(model)
    try:

        def step(**inputs):
            with collect() as results:
                logits = model(**inputs, use_cache=False).logits
            return loss_of(logits[:, 3:], results)

        if inside:
            actual = torch.compile(step, backend="aot_eager", fullgraph=True)(**batch)
        else:
            compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
            with collect() as results:
                logits = compiled(**batch, use_cache=False).logits
            assert len(results) == len(observed)
            actual = loss_of(logits[:, 3:], results)
        actual.backward()
    finally:
        unregister(model)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    found = gradients(model)
    assert found.keys() == expected_gradients.keys()
    for parameter, gradient in expected_gradients.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=2e-5 * max(1.0, scale))


def test_a_second_step_uses_the_same_graph():
    model, batch, _ = tiny("causal", "gpt2")
    gradlogz.register(model)

    def step(**inputs):
        with collect() as results:
            logits = model(**inputs, use_cache=False).logits
        return loss_of(logits, results)

    graphs = CompileCounter()
    compiled = torch.compile(step, backend=graphs, fullgraph=True)
    first, second = compiled(**batch), compiled(**batch)
    unregister(model)
    assert torch.equal(first, second)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_gradients_or_refuse_them(reentrant):
    model, batch, _ = tiny("causal", "llama")
    gradlogz.register(model)
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            model.train().gradient_checkpointing_enable({"use_reentrant": reentrant})
        with collect() as results:
            logits = model(**batch, use_cache=False).logits
        if checkpoints and reentrant:
            with pytest.raises(RuntimeError, match="reentrant"):
                loss_of(logits, results).backward()
            break
        loss_of(logits, results).backward()
        found.append(gradients(model))
    unregister(model)
    if not reentrant:
        torch.testing.assert_close(found[1], found[0])


def test_the_pass_of_a_monitor_is_not_collected():
    model, batch, _ = tiny("causal", "llama")
    gradlogz.register(model)
    compiled = torch.compile(model, backend="aot_eager")
    counts = []
    with gradlogz.monitor(compiled, every=1) as m:
        for _ in range(2):
            with collect() as results:
                compiled(**batch, use_cache=False).logits.square().mean().backward()
            counts.append(len(results))
            m.step()
    unregister(model)
    assert counts == [2, 2]


def test_a_checkpoint_is_collected_once():
    model, batch, _ = tiny("causal", "llama")
    gradlogz.register(model)
    model.train().gradient_checkpointing_enable({"use_reentrant": False})
    with collect() as results:
        model(**batch, use_cache=False).logits.square().mean().backward()
    unregister(model)
    assert len(results) == 2


def test_nothing_is_collected_outside():
    model, batch, _ = tiny("causal", "llama")
    gradlogz.register(model)
    with collect() as results:
        model(**batch)
    model(**batch)
    unregister(model)
    assert [a.entropy.shape for a in results] == [(2, 4, 12)] * 2
