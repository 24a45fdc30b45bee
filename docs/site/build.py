"""Build the documentation in site/: assemble pages, render them with Zensical, check every link, open every page.

    python docs/site/build.py [--no-outputs] [--no-browser]

1. assembly.py       the pages: docs/, files of the repository root, tutorials with their outputs, llms.txt
2. zensical          build/pages -> site/ (zensical.toml); its warnings are errors
3. link_check.py     links, anchors, pictures and style sheets of the HTML files; no request to another host
4. browser_check.py  every page in Chromium at the widths of a desktop and of a phone
"""

import argparse
import shutil
import subprocess
import sys
import time
from pathlib import Path

import assembly
import browser_check
import link_check

ROOT = Path(__file__).resolve().parents[2]
PAGES, SITE = ROOT / "build" / "pages", ROOT / "site"


def render() -> list[str]:
    """Render the pages and return the complaints of Zensical and of the packages that it calls."""
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = f"{done.stdout}\n{done.stderr}"
    # mkdocstrings reports through logging, which does not change the exit status of Zensical.
    complaints = [line for line in output.splitlines() if line.lstrip().upper().startswith(("ERROR", "WARNING"))]
    return [output] if done.returncode else complaints


def main() -> int:
    """Run the four steps and return 1 if one of them finds a fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-outputs", action="store_true", help="do not run the cells of tutorials")
    parser.add_argument("--no-browser", action="store_true", help="do not open the pages in Chromium")
    parser.add_argument("--screenshots", type=Path, help="folder for a picture of every page at both widths")
    options = parser.parse_args()
    steps = {
        "assemble": lambda: assembly.assemble(PAGES, outputs=not options.no_outputs),
        "render": render,
        "check links": lambda: link_check.faults(SITE),
    }
    if not options.no_browser:
        steps["open in a browser"] = lambda: browser_check.faults(SITE, options.screenshots)
    for name, step in steps.items():
        start = time.perf_counter()
        faults = step()
        print(f"{name}: {len(faults)} faults, {time.perf_counter() - start:.1f} s", flush=True)
        if faults:
            print("\n".join(faults), file=sys.stderr)
            return 1
    print(f"{sum(1 for _ in SITE.rglob('*.html'))} pages: {SITE / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
