"""Every reader of files, run on damaged variants of a good file: python -m support.fuzzing COUNT SEED FOLDER [READER].

Only documented errors may come out (InputError; None for a file that is simply not used). A case that takes more than
LIMIT seconds of the processor, or waits WAITING seconds, is a hang. The process may take MEMORY bytes more than it has
when every good file is read, since the modules, threads and compiled kernels of the libraries are no memory of a case.
Prints one line of JSON: cases and outcomes by reader, and the cases that failed.
"""

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
import transformers

from gradlogz._errors import InputError
from gradlogz.commands import merge, probe
from gradlogz.probing.corpus.text import documents
from gradlogz.probing.inside.checkpoint_files import weight_files
from gradlogz.probing.inside.checkpoint_names import checkpoints_of
from gradlogz.probing.inside.loading import load
from gradlogz.probing.inside.weights_hash import config_hash, weights_hash
from gradlogz.probing.measurement import with_merge_options
from gradlogz.probing.measurement_file import STATISTICS, kept_measurement, read_measurement, write_measurement
from gradlogz.probing.run_probe import chosen, evaluate
from gradlogz.probing.runs.findings_file import FINDINGS
from gradlogz.probing.runs.replicates import REPLICATES
from gradlogz.probing.runs.run_folder import PARQUET, RUN, read_run, write_run
from gradlogz.reporting.run_contents import contents_of
from gradlogz.tracking.run_tracking import track
from support import mutations
from support.saved_models import TEXTS, gpt2, llama, save, tokenizer

LIMIT = 10
WAITING = 120  # longer, since other work on a machine takes its time
MEMORY = 2 * 2**30


class HangError(BaseException):
    """A case that takes too long; no `except Exception` of a library catches it."""


# Samples: a good file or folder, and a call that reads it ----------------------------------------------------------


def model_sample(folder):
    save(gpt2(), folder)


def sharded_sample(folder):
    save(gpt2(), folder, max_shard_size="8KB")


def gguf_sample(folder):
    import gguf

    folder.mkdir()
    state, config = llama().state_dict(), llama().config
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    words = ["a", "b", "ab", "c", "abc", *(f"w{i}" for i in range(config.vocab_size - 5))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges(["a b", "ab c"])
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
    }  # fmt: skip
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_sample(folder):
    sys.path.append(str(Path(__file__).parents[1] / "faults"))
    from test_a_run_is_written_whole_or_not_at_all import run_of

    write_run(folder, run_of(1))


def table_sample(folder):
    folder.mkdir()
    rows = [f"{t},{name},{t * 3.0 + i},{t * -2.0 + i}" for t in range(6) for i, name in enumerate(("a", "b"))]
    (folder / "table.csv").write_text("\n".join(["time,target,x,y", *rows]))


def parquet_sample(folder):
    import polars

    folder.mkdir()
    columns = {
        "time": [*range(6)],
        "target": ["a"] * 6,
        "x": [t * 3.0 for t in range(6)],
        "y": [t * -2.0 for t in range(6)],
    }
    polars.DataFrame(columns).write_parquet(folder / "table.parquet")


def statistics_sample(folder):
    from gradlogz.probing.run_probe import measure

    model, words = gpt2(3), tokenizer()
    written = measure(model.eval(), words, documents(TEXTS), predictions=chosen(["entropy"]), draws=0)
    options = {"seed": 0, "draws": 0, "baseline": 0.1, "model": "m", "dtype": None, "revision": None, "predictions": []}
    written = with_merge_options(written, options)
    written = written._replace(facts={**written.facts, "weights_sha256": "a", "config_sha256": "b"})
    assert write_measurement(folder, written, {"text": "same"}) == ""


def merge_sample(folder):
    """Two runs without draws, so that no model is loaded to join them; the statistics of one are damaged."""
    folder.mkdir()
    save(gpt2(3), folder / "model")
    for name, texts in (("a", TEXTS[:4]), ("b", TEXTS[4:])):
        (folder / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
        probe.command(
            [str(folder / "model")], text=str(folder / f"{name}.jsonl"), tokens=0, only=["entropy"], draws=0,
            keep_statistics=True, device="cpu", out=str(folder / name),
        )  # fmt: skip
    described = json.loads((folder / "a" / RUN).read_text())
    del described["files"]  # an attacker would write the checksums of the damaged files
    (folder / "a" / RUN).write_text(json.dumps(described))


def list_sample(folder):
    folder.mkdir()
    for step in (100, 200):
        save(gpt2(), folder / f"checkpoint-{step}", words=False)
    (folder / "names").write_text(f"{folder}\nminilm\nowner/name@main")


def read_model(folder):
    load(folder, device="cpu")


def read_gguf(folder):
    load(folder / "model.gguf", device="cpu")


def read_hashes(folder):
    from gradlogz.probing.inside.loading import locate

    located = locate(folder)
    weights_hash(located), config_hash(located)
    weight_files(located.folder, located.format)


def read_runs(folder):
    contents_of(str(folder), "report")
    read_run(folder)


def read_table(folder):
    (file,) = folder.glob("table.*")
    track(file, sigma=1.0, noise=1.0, outliers=0.0)


def read_statistics(folder):
    measured = read_measurement(folder, {"text": "same"}, chosen(["entropy"]))
    if measured is not None:
        evaluate(measured, predictions=["entropy"])
    kept_measurement(folder, chosen(["entropy"]))


def read_merge(folder):
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        merge.command([str(folder / "a"), str(folder / "b")], out=str(folder.with_name("merged")))


def read_names(folder):
    checkpoints_of((folder / "names").read_bytes().decode("utf-8", "surrogateescape").split("\n"))


TEXT, TENSORS, BYTES = mutations.damaged_text, mutations.damaged_safetensors, mutations.damaged_bytes
READERS = {  # sample, call, files with their mutations, share of the cases
    "config": (model_sample, read_model, {"config.json": TEXT}, 4),
    "safetensors": (model_sample, read_model, {"model.safetensors": TENSORS}, 3),
    "index": (sharded_sample, read_model, {"model.safetensors.index.json": TEXT}, 2),
    "tokenizer": (model_sample, read_model, {"tokenizer.json": TEXT, "tokenizer_config.json": TEXT}, 3),
    "gguf": (gguf_sample, read_gguf, {"model.gguf": BYTES}, 3),
    "hashes": (model_sample, read_hashes, {"config.json": TEXT, "model.safetensors": TENSORS}, 1),
    "run": (run_sample, read_runs, {RUN: TEXT, FINDINGS: TEXT, REPLICATES: TENSORS, PARQUET: BYTES}, 3),
    "csv": (table_sample, read_table, {"table.csv": mutations.damaged_table}, 3),
    "parquet": (parquet_sample, read_table, {"table.parquet": BYTES}, 2),
    "names": (list_sample, read_names, {"names": BYTES}, 1),
    "statistics": (statistics_sample, read_statistics, {STATISTICS: mutations.damaged_state}, 2),
    "merge": (merge_sample, read_merge, {f"a/{STATISTICS}": mutations.damaged_state}, 1),
}


def outcome_of(call, folder):
    """Run one case; return what came of it, and the text of an undocumented error."""

    def hang(*_):
        raise HangError

    signal.signal(signal.SIGPROF, hang)
    signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    signal.alarm(WAITING)
    try:
        call(folder)
    except InputError as error:
        return ("error", f"several lines: {error}") if "\n" in str(error) else ("refused", "")
    except HangError:
        return "hang", traceback.format_exc()
    except MemoryError:
        return "memory", traceback.format_exc()
    except Exception:
        return "error", traceback.format_exc()
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        return "error", traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
    return "read", ""


def fuzz(name, count, seed, place):
    """Run the cases of one reader, whose good file is in the folder of its name."""
    _, call, files, _ = READERS[name]
    good = place / name
    outcomes, failures, slowest = Counter(), [], 0.0
    for case in range(count):
        rng = random.Random(f"{seed} {name} {case}")
        file = rng.choice(list(files))
        original = (good / file).read_bytes()
        (good / file).write_bytes(files[file](original, rng))
        begun = time.process_time()
        outcome, text = outcome_of(call, good)
        slowest = max(slowest, time.process_time() - begun)
        outcomes[outcome] += 1
        if text:
            failures.append({"reader": name, "case": case, "file": file, "outcome": outcome, "text": text[-1500:]})
            if target := os.environ.get("FUZZ_KEEP"):
                shutil.copytree(good, Path(target) / f"{name}-{case}", dirs_exist_ok=True)
        (good / file).write_bytes(original)
    return dict(outcomes), failures, slowest


def main(count, seed, place, names):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    for name in names:
        sample, call, _, _ = READERS[name]
        sample(Path(place) / name)
        call(Path(place) / name)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, resource.RLIM_INFINITY))
    shares = sum(READERS[name][3] for name in names)
    result = {"outcomes": {}, "failures": [], "slowest": {}}
    for name in names:
        number = -(-count * READERS[name][3] // shares)
        outcomes, failures, slowest = fuzz(name, number, seed, Path(place))
        result["outcomes"][name] = outcomes
        result["failures"] += failures
        result["slowest"][name] = round(slowest, 2)
    result["cpu"] = round(time.process_time(), 1)
    result["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(result))


if __name__ == "__main__":
    count, seed, place, *names = sys.argv[1:]
    main(int(count), seed, place, names or list(READERS))
