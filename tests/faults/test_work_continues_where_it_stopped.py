"""Work over items gives the same states whatever computes it, and continues after any fault where it stopped.

Faults are real: workers, whole runs and a node of a Ray cluster are killed, files are cut and changed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradlogz.engine import InProcess, LocalProcesses, RayCluster, SlurmArray, engine_of, run_items
from gradlogz.engine.state_file import DTYPES, Encoded, NotStorableError, read_state
from gradlogz.engine.work_folder import WorkFolder
from support import engine_work
from support.engine_work import (
    Item,
    Moments,
    always_killed,
    fails,
    killed_once,
    killed_while_writing,
    moments,
    visible_gpus,
)

MODULES = {"support.engine_work": vars(engine_work)}
IDS = [f"item-{number}" for number in range(6)]


def items(marks="", seconds=0.0):
    return {name: Item(number, str(marks), seconds) for number, name in enumerate(IDS)}


def same(one, other):
    assert list(one) == list(other)
    for a, b in zip(one.values(), other.values(), strict=True):
        assert (a.count, a.parts.keys(), a.parts["largest"]) == (b.count, b.parts.keys(), b.parts["largest"])
        assert torch.equal(a.sums, b.sums)


@pytest.fixture
def importable(monkeypatch):
    """Worker processes of submitit and ray find the functions of the tests."""
    tests = os.path.dirname(os.path.dirname(engine_work.__file__))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])]))


@pytest.fixture(scope="module")
def expected():
    return {name: moments(item) for name, item in items().items()}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("kept", [False, True])
def test_states_do_not_depend_on_the_number_of_processes(tmp_path, expected, workers, kept):
    options = {"folder": tmp_path / "work", "modules": MODULES} if kept else {}
    found = run_items(moments, items(), engine=LocalProcesses(workers), **options)
    same(found.states, expected)
    assert not found.failures
    assert not found.interrupted


def test_states_are_returned_in_the_order_of_their_ids():
    assert list(run_items(len, {"b": "x", "c": "", "a": "yy"}).states.items()) == [("a", 2), ("b", 1), ("c", 0)]


def test_slurm_gives_gpus_to_jobs(tmp_path):
    assert engine_of("x", "slurm", folder=tmp_path, gpus=2).options == {"gpus_per_node": 2}
    assert engine_of("x", "slurm", folder=tmp_path).options == {}


def test_submitit_computes_the_same(tmp_path, expected, importable):
    work = tmp_path / "work"
    found = run_items(moments, items(), engine=SlurmArray(tmp_path / "jobs", 2), folder=work, modules=MODULES)
    same(found.states, expected)


def test_the_item_of_a_killed_job_is_tried_again(tmp_path, expected, importable):
    marks = tmp_path / "marks"
    marks.mkdir()
    chosen = {name: item for name, item in items(marks).items() if item.seed in (1, 2)}
    found = run_items(killed_once, chosen, engine=SlurmArray(tmp_path / "jobs", 2))
    same(found.states, {name: expected[name] for name in chosen})
    assert (marks / "2").read_text() == "xx"


@pytest.mark.parametrize("workers", [1, 2])
def test_the_item_of_a_killed_process_is_tried_again(tmp_path, expected, workers):
    found = run_items(killed_once, items(tmp_path), engine=LocalProcesses(workers))
    same(found.states, expected)


def test_a_worker_that_is_killed_while_it_writes_leaves_no_file(tmp_path, expected):
    work, marks = tmp_path / "work", tmp_path / "marks"
    marks.mkdir()
    found = run_items(killed_while_writing, items(marks), engine=LocalProcesses(2), folder=work, modules=MODULES)
    same(found.states, expected)
    assert (marks / "2").read_text() == "xx"
    assert not list(work.glob("*/.*"))


def test_a_state_is_a_file_that_safetensors_reads(tmp_path):
    """Tensors of all types, empty ones, parts of others, transposed ones; each is written once."""
    whole = torch.arange(12.0).reshape(3, 4)
    kinds = [torch.tensor([1, 0, 1]).to(dtype) for dtype in DTYPES]
    state = [*kinds, whole, whole, whole.mT, whole[1:, :2], whole[0], torch.zeros(0, 3), torch.tensor(2.5)]
    Encoded({"tensors": state, "text": "\udcff"}).write(tmp_path / "state", {"item": "a"})
    read = read_state(tmp_path / "state", facts={"item": "a"})
    assert read["text"] == "\udcff"
    for one, other in zip(state, read["tensors"], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert read["tensors"][len(kinds)] is read["tensors"][len(kinds) + 1]
    written = load_file(tmp_path / "state")
    assert len(written) == len(state) - 1
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in written.values())
    with pytest.raises(NotStorableError, match="complex64"):
        Encoded(torch.zeros(1, dtype=torch.complex64))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_item_that_kills_every_process_is_named_and_the_others_are_kept(tmp_path, expected, workers):
    found = run_items(always_killed, items(tmp_path), engine=LocalProcesses(workers))
    same(found.states, {name: state for name, state in expected.items() if name != "item-2"})
    assert "died in 3 attempts" in found.failures["item-2"]
    assert (tmp_path / "2").read_text() == "xxx"


@pytest.mark.parametrize("engine", [InProcess(), LocalProcesses(2)])
def test_an_item_that_raises_is_named_and_the_others_are_kept(tmp_path, expected, engine):
    found = run_items(fails, items(), engine=engine, folder=tmp_path / "work", modules=MODULES)
    same(found.states, {name: state for name, state in expected.items() if name != "item-2"})
    assert list(found.failures) == ["item-2"]
    assert "ZeroDivisionError: seed two" in found.failures["item-2"]
    events = [json.loads(line) for line in (tmp_path / "work/events.jsonl").read_text().splitlines()]
    assert [event["item"] for event in events if event["event"] == "failed"] == ["item-2"]


KILLED = """
import sys
from pathlib import Path
from gradlogz.engine import LocalProcesses, run_items
from support.engine_work import Item, moments

if __name__ == "__main__":
    folder, marks = sys.argv[1:]
    items = {f"item-{number}": Item(number, marks, 0.2) for number in range(6)}
    run_items(moments, items, engine=LocalProcesses(1), folder=folder)
"""


def running(process):
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_continues_to_the_same_states(tmp_path, expected, importable, ending):
    work, marks, script = tmp_path / "work", tmp_path / "marks", tmp_path / "killed.py"
    marks.mkdir()
    script.write_text(KILLED)
    process = subprocess.Popen([sys.executable, str(script), str(work), str(marks)])
    deadline = time.monotonic() + 60
    while len(list(work.glob("items/item-*"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(ending)
    process.wait()
    finished = [json.loads(line) for line in (work / "events.jsonl").read_text().splitlines()[1:]]
    for worker in {int(event["worker"].partition(":")[2]) for event in finished}:
        while running(worker):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    before = {path.name for path in work.glob("items/item-*")}
    assert 2 <= len(before) < 6
    found = run_items(moments, items(marks), engine=InProcess(), folder=work, modules=MODULES)
    same(found.states, expected)
    assert before <= {path.name for path in work.glob("items/item-*")}
    assert (marks / "0").read_text() == "x"  # not computed again


@pytest.mark.parametrize("damage", ["cut", "changed", "foreign"])
def test_a_damaged_state_is_computed_again(tmp_path, expected, damage):
    run_items(moments, items(), folder=tmp_path / "work", modules=MODULES)
    path = next((tmp_path / "work/items").glob("item-3-*"))
    content = path.read_bytes()
    changes = {"cut": content[:-9], "changed": content[:-1] + bytes([content[-1] ^ 1]), "foreign": b"something else"}
    path.write_bytes(changes[damage])
    found = run_items(moments, items(), folder=tmp_path / "work", modules=MODULES)
    same(found.states, expected)
    assert path.read_bytes() == content


def test_the_difference_to_other_work_is_named_and_restart_begins_again(tmp_path, expected):
    work = tmp_path / "work"
    run_items(moments, items(), folder=work, facts={"beta": 1.0, "text": "a"}, modules=MODULES)
    with pytest.raises(ValueError, match=r"beta was 1.0 and is 2.0; seed was not given and is 3.*restart"):
        run_items(moments, items(), folder=work, facts={"beta": 2.0, "text": "a", "seed": 3}, modules=MODULES)
    found = run_items(moments, items(), folder=work, facts={"beta": 2.0}, restart=True, modules=MODULES)
    same(found.states, expected)
    run_items(moments, items(), folder=work, facts={"beta": 2.0}, modules=MODULES)


def test_work_that_was_killed_before_its_facts_were_written_begins(tmp_path):
    (tmp_path / "items").mkdir()
    (tmp_path / ".work.json.17.0123abcd.part").write_text('{"for')
    assert run_items(len, {"a": "x"}, folder=tmp_path).states == {"a": 1}


def test_damaged_facts_are_refused(tmp_path):
    other = "beta was not given and is 1"
    texts = {
        '{"facts": {"beta": 1}}': other,
        '{"format": 99, "facts": {"beta": 1}}': other,
        "[]": "damaged",
        "{": "damaged",
    }
    for text, problem in texts.items():
        run_items(len, {"a": "x"}, folder=tmp_path, facts={"beta": 1}, restart=True)
        (tmp_path / "work.json").write_text(text)
        with pytest.raises(ValueError, match=problem):
            run_items(len, {"a": "x"}, folder=tmp_path, facts={"beta": 1})
    with pytest.raises(ValueError, match="damaged"):
        run_items(len, {"a": "x"}, folder=tmp_path)


def test_a_second_process_in_the_folder_is_refused(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    work = tmp_path / "work"
    run_items(len, {"a": "x"}, folder=work)
    with (work / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another process works"):
            run_items(len, {"a": "x"}, folder=work)
    run_items(len, {"a": "x"}, folder=work)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(ValueError, match="has other files"):
            run_items(len, {"a": "x"}, folder=tmp_path, restart=restart)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ValueError, match="is a file"):
        run_items(len, {"a": "x"}, folder=tmp_path / "thesis.txt")


@pytest.mark.parametrize("begun", [False, True])
def test_a_folder_that_cannot_be_written_is_refused(tmp_path, begun):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting needs root")
    try:
        if begun:
            run_items(len, {"a": "x"}, folder=disk / "work")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for restart in (False, True):
            with pytest.raises(ValueError, match="Read-only file system"):
                run_items(len, {"a": "x", "b": "yy"}, folder=disk / "work", restart=restart)
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
        place = WorkFolder("x", disk / "work", {})
        with place.opened():
            with pytest.raises(OSError, match="No space left"):
                (disk / "other").write_bytes(bytes(2**19))
            place.log("failed", item="a", error="e" * 2**14)  # the record of the work does not end it
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_ids_are_file_names(tmp_path):
    for name in ("../a", "", "a/b", "a b", ".a"):
        with pytest.raises(ValueError, match="file"):
            run_items(len, {name: "x"}, folder=tmp_path)


def test_ctrl_c_keeps_what_is_finished(tmp_path, expected):
    def interrupt(done, _):
        if done == 3:
            raise KeyboardInterrupt

    found = run_items(moments, items(), folder=tmp_path / "work", modules=MODULES, progress=interrupt)
    assert found.interrupted
    same(found.states, {name: expected[name] for name in IDS[:3]})


def test_engines_have_names():
    assert isinstance(engine_of("x", "process"), InProcess)
    assert engine_of("x", "processes", workers=3).workers == 3
    with pytest.raises(ValueError, match="engine must be one of"):
        engine_of("x", "spark")
    with pytest.raises(ValueError, match="address"):
        engine_of("x", "processes", address="auto")
    with pytest.raises(ValueError, match="folder"):
        engine_of("x", "slurm")
    with pytest.raises(ValueError, match="workers must be positive"):
        engine_of("x", "processes", workers=0)
    with pytest.raises(ValueError, match="gpus"):
        engine_of("x", "processes", gpus=1)


@pytest.mark.parametrize("package", ["ray", "submitit"])
def test_a_missing_package_is_named(monkeypatch, tmp_path, package):
    monkeypatch.setattr("gradlogz.engine.engines.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"{package} is needed"):
        engine_of("x", {"ray": "ray", "submitit": "slurm"}[package], folder=tmp_path)


# Ray ------------------------------------------------------------------------------------------------------------------


def test_ray_computes_the_same_and_survives_killed_workers_and_a_killed_node(tmp_path, expected, importable):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    marks = tmp_path / "marks"
    marks.mkdir()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 1})
    other = cluster.add_node(num_cpus=1)
    engine = RayCluster(cluster.address)
    done = []

    def kill_node(count, _):
        done.append(count)
        if len(done) == 2:  # the first item has ended
            cluster.remove_node(other, allow_graceful=False)

    try:
        slow = items(marks, 0.5)
        found = run_items(moments, slow, engine=engine, folder=tmp_path / "a", modules=MODULES, progress=kill_node)
        same(found.states, expected)
        again = tmp_path / "again"
        again.mkdir()
        same(run_items(killed_once, items(again), engine=engine).states, expected)
        failed = run_items(fails, items(), engine=engine)
        assert list(failed.failures) == ["item-2"]
        on_gpus = run_items(visible_gpus, items(), engine=engine_of("x", "ray", address=cluster.address, gpus=1))
        assert set(on_gpus.states.values()) == {"0"}
    finally:
        ray.shutdown()
        cluster.shutdown()


def test_states_of_foreign_classes_are_not_read(tmp_path):
    run_items(moments, items(), folder=tmp_path / "work", modules=MODULES)
    with pytest.raises(RuntimeError, match="not the state of item-0"):
        run_items(moments, items(), folder=tmp_path / "work")
    assert issubclass(Moments, tuple)


# Commands -------------------------------------------------------------------------------------------------------------

SWEEP = ["simulate", "--tokens", "40", "--steps", "30", "--sweep", "beta=0.2:1.2:6,dim=1|2|3|4", "--out", "phases.html"]


def command(folder, *words):
    return subprocess.Popen([sys.executable, "-m", "gradlogz", *SWEEP, *words], cwd=folder, stdout=subprocess.DEVNULL)


def test_a_killed_sweep_continues_to_the_same_bytes(tmp_path):
    assert command(tmp_path, "--engine", "process", "--json", "undisturbed.json").wait() == 0
    process = command(tmp_path, "--workers", "1", "--resume", "parts", "--json", "phases.json")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("parts/items/batch-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (tmp_path / "phases.json").exists()
    assert command(tmp_path, "--workers", "2", "--resume", "parts", "--json", "phases.json").wait() == 0
    assert (tmp_path / "phases.json").read_bytes() == (tmp_path / "undisturbed.json").read_bytes()


def test_a_batch_that_fails_is_named_and_the_others_are_written(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from gradlogz import cli
    from gradlogz.simulation import parameter_sweep

    right = parameter_sweep.run_batch

    def broken(batch):
        if batch[0].dim == 2:
            raise MemoryError("out of memory")
        return right(batch)

    monkeypatch.setattr(parameter_sweep, "run_batch", broken)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli.application(), [*SWEEP, "--engine", "process", "--json", "phases.json"])
    assert result.exit_code == 3
    assert "batch-00001 failed: MemoryError: out of memory" in result.output
    assert len(json.loads((tmp_path / "phases.json").read_text())["places"]) == 18


def test_a_folder_of_other_settings_is_refused(tmp_path):
    assert command(tmp_path, "--engine", "process", "--resume", "parts", "--json", "phases.json").wait() == 0
    assert command(tmp_path, "--engine", "process", "--resume", "parts", "--json", "phases.json").wait() == 0
    assert command(tmp_path, "--engine", "process", "--resume", "parts", "--seed", "3").wait() == 2
    assert command(tmp_path, "--engine", "process", "--resume", "parts", "--seed", "3", "--restart").wait() == 0
