"""`attend` takes the mask objects of torch, and its results are saved, counted and profiled like those of torch."""

import io
import subprocess
import sys

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

import gradlogz
from gradlogz import attend
from gradlogz.attention import Attention
from support.small_trainings import GPT, batches
from support.tiny_models import tiny

M, N = 70, 90
DOCUMENTS = torch.arange(N) // 40


def in_document(b, h, query, key):
    """Batch and head change the mask."""
    return (DOCUMENTS[query] == DOCUMENTS[key]) & ((query + key + b + h) % 3 > 0)


def operands(tokens=(M, N, N), heads=(2, 3)):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*heads, n, 8, generator=generator, dtype=torch.float64, requires_grad=True) for n in tokens]


@pytest.mark.parametrize(("b", "h", "size"), [(None, None, 128), (2, 3, 16), (2, None, 32)])
def test_a_block_mask_is_its_tensor(b, h, size):
    q, k, v = operands()
    mask = create_block_mask(in_document, b, h, M, N, device="cpu", BLOCK_SIZE=size)
    grid = torch.meshgrid(*(torch.arange(n or 1) for n in (b, h)), torch.arange(M), torch.arange(N), indexing="ij")
    expected = attend(q, k, v, attn_mask=in_document(*grid))
    actual = attend(q, k, v, attn_mask=mask)
    for each, other in zip(actual[:6], expected[:6], strict=True):
        assert torch.equal(each, other)


def test_a_block_mask_of_blocks_alone_hides_the_others():
    counts, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[0, 1], [0, 1]]]])
    q, k, v = operands((8, 8, 8))
    mask = torch.ones(2, 2).tril().bool().repeat_interleave(4, 0).repeat_interleave(4, 1)
    actual = attend(q, k, v, attn_mask=BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=4))
    assert torch.equal(actual.output, attend(q, k, v, attn_mask=mask).output)


def test_names_of_flex_attention():
    a = attend(*operands())
    assert a.lse is a.log_normalizer
    assert a.max_scores is a.max_logit


def test_a_result_is_loaded_as_weights():
    a = Attention(*(None if t is None else t.detach() for t in attend(*operands())))
    file = io.BytesIO()
    torch.save(a, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert isinstance(loaded, Attention)
    torch.testing.assert_close(loaded, a, rtol=0, atol=0)


def test_operations_are_counted_as_those_of_sdpa():
    q, k, v = operands()
    with FlopCounterMode(display=False) as counter:
        attend(q, k, v).output.sum().backward()
    pairs, (forward, backward) = 2 * 3 * M * N, counter.get_flop_counts()["Global"].values()
    assert forward == 2 * pairs * (8 + 8), "logits and outputs"
    assert backward == 2 * pairs * 5 * 8, "logits, and gradients of weights, values, queries and keys"


def test_the_compiled_kernel_has_a_name_in_the_profiler():
    pytest.importorskip("numba")
    q, k, v = (t.detach().float().requires_grad_() for t in operands())
    with profile() as profiler:
        attend(q, k, v).output.sum().backward()
    names = {event.key for event in profiler.key_averages()}
    assert {"gradlogz::attention on a CPU", "gradlogz::attention_backward on a CPU"} <= names


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_an_observed_model_returns_its_weights(name):
    model, batch, _ = tiny("seq2seq" if name == "t5" else "causal", name)
    field = "decoder_attentions" if name == "t5" else "attentions"
    with torch.no_grad():
        expected = model(**batch, output_attentions=True)[field]
        with gradlogz.observe(model):
            actual = model(**batch, output_attentions=True)[field]
    assert len(actual) == len(expected) == 2
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-6)


def test_statistics_in_a_reentrant_checkpoint_are_read_but_not_differentiated():
    """That differentiation is an error: tests/errors/test_errors_of_watching.py."""
    model, ids = GPT(dropout=0.0), batches(1)[0]
    with gradlogz.observe(model) as plain:
        model(ids)

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, x):
            anchor = torch.ones(1, requires_grad=True)
            return torch.utils.checkpoint.checkpoint(lambda y, _: self.inner(y), x, anchor, use_reentrant=True)

    with gradlogz.observe(outer := Checkpointed()) as observed:
        outer(ids).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(observed.stack("entropy").detach(), plain.stack("entropy").detach())


FIRST_USE_IN_CONTEXT_PARALLEL = """
import torch
from torch import distributed
from torch.distributed.tensor.experimental import context_parallel
import gradlogz

distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
q = torch.randn(1, 2, 8, 16)
try:
    with context_parallel(distributed.init_device_mesh("cpu", (1,)), buffers=[q], buffer_seq_dims=[2]):
        gradlogz.attend(q, q, q)
except NotImplementedError as error:
    assert "ring_attend" in str(error)
    assert gradlogz.attend(q, q, q).output.shape == q.shape
    print("refused")
"""


def test_attend_is_refused_inside_context_parallel_alone():
    """Also where it is first imported inside, while torch has replaced SDPA."""
    program = [sys.executable, "-c", FIRST_USE_IN_CONTEXT_PARALLEL]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.stdout == "refused\n", done.stderr[-2000:]
