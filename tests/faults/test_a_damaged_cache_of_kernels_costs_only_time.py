"""Whatever happens to the files of numba's cache, a kernel computes the same numbers: it is compiled again.

Two small kernels are compiled by the function that compiles those of this package, in another process, since machine
code of the wrong kernel would end it: numba alone does so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from gradlogz.kernels.optional import use_own_cache

SCRIPT = """
import json, os, pickle, sys
from pathlib import Path

import numpy

from gradlogz.kernels.simd import take
from gradlogz.kernels.workers import compile_worker


def one(plan: int) -> None:
    take(plan)


def two(plan: int) -> None:
    take(plan)
    take(plan)


def run(name, damage=lambda: None):
    # What the kernels compute, and how many of the two came from the cache.
    damage()
    numbers, loaded = [], 0
    for function in (one, two):
        worker = compile_worker(function)
        counter = numpy.array([20], numpy.int64)
        worker.ctypes(counter.ctypes.data)
        numbers.append(int(counter[0]))
        loaded += worker.cache_hits
    results[name] = [*numbers, loaded]


def files(suffix):
    return sorted(Path("cache").rglob(f"*{suffix}"))


class Poison:
    def __reduce__(self):
        return open, ("sprung", "w")


def flipped():
    first = files(".nbc")[0]
    data = bytearray(first.read_bytes())
    data[len(data) // 2] ^= 255
    first.write_bytes(data)


def exchanged():
    first, second = files(".nbc")
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)


def given_away():
    os.chown(files(".nbi")[0], 12345, -1)


results = {}
run("cold")
run("warm")
run("emptied", lambda: files(".nbi")[0].write_bytes(b""))
run("cut", lambda: files(".nbc")[0].write_bytes(files(".nbc")[0].read_bytes()[:-100]))
run("flipped", flipped)
run("exchanged", exchanged)
run("poisoned", lambda: files(".nbi")[0].write_bytes(pickle.dumps(Poison())))
run("forgotten", lambda: files(".sha256")[0].unlink())
run("warm again")
if os.geteuid() == 0:
    folder = files(".nbi")[0].parent
    run("given away", given_away)
    run("folder given away", lambda: os.chown(folder, 12345, -1))
    os.chown(folder, 0, -1)
    run("folder for everyone", lambda: folder.chmod(0o777))
    folder.chmod(0o755)
    run("warm at last")
print(json.dumps(results))
"""
FUNCTIONS = """
from gradlogz.kernels.workers import CachedFunction


def one(numbers):
    numbers[0] += 1


def two(numbers):
    numbers[0] += 2


def run(name, damage=lambda: None):
    damage()
    numbers, loaded = [], 0
    for function in (one, two):
        cached, counter = CachedFunction(function), numpy.array([20], numpy.int64)
        cached(counter)
        numbers.append(int(counter[0]))
        loaded += sum(cached.compiled.stats.cache_hits.values())
    results[name] = [*numbers, loaded]


results = {}
"""
# The same with functions of arrays in place of workers
SCRIPT_OF_FUNCTIONS = SCRIPT.replace("results = {}", FUNCTIONS)
LOADED = {  # kernels of two that come from the cache
    "cold": 0, "warm": 2, "emptied": 1, "cut": 1, "flipped": 1, "exchanged": 0, "poisoned": 1, "forgotten": 1,
    "warm again": 2, "given away": 1, "folder given away": 0, "folder for everyone": 0, "warm at last": 2,
}  # fmt: skip


def results_in(folder, script=SCRIPT):
    (folder / "kernels.py").write_text(script)
    environment = {**os.environ, "NUMBA_CACHE_DIR": "cache"}
    command = [sys.executable, "kernels.py"]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("script", [SCRIPT, SCRIPT_OF_FUNCTIONS], ids=["workers", "functions"])
def test_a_damaged_entry_is_compiled_again(tmp_path, script):
    results = results_in(tmp_path, script)
    assert len(results) >= 9
    for name, (one, two, loaded) in results.items():
        assert (one, two) == (21, 22), name
        assert loaded == LOADED[name], name
    assert not (tmp_path / "sprung").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
@pytest.mark.parametrize("script", [SCRIPT, SCRIPT_OF_FUNCTIONS], ids=["workers", "functions"])
def test_a_full_disk_costs_only_time(tmp_path, script):
    (tmp_path / "cache").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(tmp_path / "cache")]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    script = script.replace('run("warm")', "print(json.dumps(results)), sys.exit()")
    try:
        assert results_in(tmp_path, script) == {"cold": [21, 22, 0]}
    finally:
        subprocess.run(["umount", str(tmp_path / "cache")], check=True)


def test_the_cache_of_triton_is_not_shared(tmp_path):
    triton = SimpleNamespace(knobs=SimpleNamespace(cache=SimpleNamespace(dir=str(tmp_path / "cache"))))
    use_own_cache(triton)  # there is none yet
    (tmp_path / "cache").mkdir(mode=0o755)
    use_own_cache(triton)
    assert triton.knobs.cache.dir == str(tmp_path / "cache")
    (tmp_path / "cache").chmod(0o777)
    with pytest.warns(RuntimeWarning, match="TRITON_CACHE_DIR"):
        use_own_cache(triton)
    assert triton.knobs.cache.dir != str(tmp_path / "cache")
    assert Path(triton.knobs.cache.dir).stat().st_mode & 0o077 == 0
    Path(triton.knobs.cache.dir).rmdir()


def test_machine_code_of_other_sources_is_removed(tmp_path, monkeypatch):
    """Numba compares the file of a kernel alone; constants of a file that it imports are in the machine code, too."""
    compiled_cache = pytest.importorskip("gradlogz.kernels.compiled_cache")
    entry = compiled_cache.CacheEntry(tmp_path, "kernel")
    for name in ("kernel.nbi", "kernel.1.nbc"):
        (tmp_path / name).write_bytes(name.encode())
    compiled_cache.seal(entry)
    assert compiled_cache.make_sound(entry)
    assert len(entry.files) == 2
    monkeypatch.setattr(compiled_cache, "sources_hash", lambda: "other")
    assert compiled_cache.make_sound(entry)
    assert not entry.files
