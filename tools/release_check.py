"""Build wheel and sdist in dist/, check them, and run the smoke test of each in a new environment with PyTorch only.

    python tools/release_check.py [--python PYTHON] [--torch SPECIFIER] [--index URL]

The environments are temporary. The sdist is installed from source, so that it must contain all that a wheel is made of.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
LIMIT = 2_000_000  # bytes of a wheel or sdist
SOURCES = ("gradlogz/__init__.pyi", "gradlogz/py.typed", "gradlogz/references.bib")
EXPECTED = {".whl": (*SOURCES, "licenses/LICENSE"), ".gz": (*SOURCES, "/LICENSE", "/CITATION.cff", "/pyproject.toml")}
NEVER = ("tests/", "__pycache__", ".ipynb", "docs/")


def version() -> str:
    """Return the version, which is written in one place: src/gradlogz/__init__.py."""
    text = (ROOT / "src" / "gradlogz" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)[1]


def build() -> list[Path]:
    """Build sdist and wheel with hatchling, as the front end of pip does."""
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], check=True, stdout=subprocess.DEVNULL
    )
    return sorted(DIST.iterdir())


def names_in(distribution: Path) -> list[str]:
    """Return the names of the files in a wheel or sdist."""
    if distribution.suffix == ".whl":
        with zipfile.ZipFile(distribution) as wheel:
            return wheel.namelist()
    with tarfile.open(distribution) as sdist:
        return sdist.getnames()


def faults_of(distribution: Path) -> list[str]:
    """Return what is wrong with the size and the contents of a wheel or sdist."""
    name, size, names = distribution.name, distribution.stat().st_size, names_in(distribution)
    expected = EXPECTED[distribution.suffix]
    faults = [f"{name} has {size} bytes, more than {LIMIT}"] * (size > LIMIT)
    faults += [f"{name} lacks {file}" for file in expected if not any(file in each for each in names)]
    return faults + [f"{name} contains {each}" for each in names if any(part in each for part in NEVER)]


def smoke_test(distribution: Path, python: str, torch: str, index: str | None) -> None:
    """Install a distribution beside PyTorch in a new environment and run tools/smoke_test.py there."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        inside = str(Path(folder) / "bin" / "python")
        pip = [inside, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *(["--index-url", index] if index else []), torch], check=True)
        subprocess.run([*pip, str(distribution)], check=True)
        subprocess.run(
            [inside, "-I", "-W", "ignore", str(ROOT / "tools" / "smoke_test.py"), version()], check=True, cwd=folder
        )


def main() -> int:
    """Build, check and test; return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the new environments")
    parser.add_argument("--torch", default="torch", help="requirement for PyTorch, such as torch==2.13.0")
    parser.add_argument("--index", help="package index with CPU builds of PyTorch")
    options = parser.parse_args()
    distributions = build()
    faults = [fault for distribution in distributions for fault in faults_of(distribution)]
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        return 1
    for distribution in distributions:
        print(f"{distribution.name}: {distribution.stat().st_size / 1e6:.2f} MB", flush=True)
        smoke_test(distribution, options.python, options.torch, options.index)
    return 0


if __name__ == "__main__":
    sys.exit(main())
