"""Open every page of the site in Chromium, at the widths of a desktop and of a phone, and return what is wrong.

A fault is a message on the console, an exception, a request to another host, a page that is wider than the window, a
formula that is cut, a name in a table that is broken within, a tag that no browser knows, or text that was misread as
markup.
"""

import functools
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WIDTHS = {"desktop": 1280, "phone": 390}
FORMULAS_CUT = """[...document.querySelectorAll("math[display=block]")]
    .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => "formula is cut: " + e.textContent)"""
NAMES_BROKEN = """[...document.querySelectorAll("td code")]
    .filter(e => /^[\\w.]+$/.test(e.textContent) && !e.querySelector("wbr") && e.getClientRects().length > 1)
    .map(e => "name in a table is broken: " + e.textContent)"""
# <x, y> in a formula that was read as a tag: the browser hides it, or makes a link of all that follows <a, b>.
TAGS_UNKNOWN = """[...document.querySelectorAll("body *")]
    .filter(e => e instanceof HTMLUnknownElement || (e.localName === "a" && !e.matches("[href], [id], [name]")))
    .map(e => "unknown tag: " + e.outerHTML.slice(0, 80))"""
# The star of x* opens no emphasis on GitHub, but does in Python-Markdown; code shows an entity as it is written.
MARKUP_MISREAD = """[...document.querySelectorAll("article em")].filter(e => /^[^\\p{L}\\p{N}"]/u.test(e.textContent))
    .concat([...document.querySelectorAll("article code")].filter(e => /&(lt|gt|amp);/.test(e.textContent)))
    .map(e => "markup is misread: " + e.textContent.slice(0, 80))"""
CHECKS = (FORMULAS_CUT, NAMES_BROKEN, TAGS_UNKNOWN, MARKUP_MISREAD)
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


class _Silent(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Write no log."""


@contextmanager
def served(site: Path) -> Iterator[str]:
    """Serve the site on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def faults(site: Path, screenshots: Path | None = None) -> list[str]:
    """Open all pages; with `screenshots`, also write a picture of each to this folder."""
    from playwright.sync_api import sync_playwright

    executable = next((path for path in map(shutil.which, CHROMIUM) if path), None)
    if executable is None:
        return ["no Chromium on this machine: apt-get install chromium, or make DOCS=--no-browser docs"]
    complaints: list[str] = []
    with served(site) as host, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name, width in WIDTHS.items():
            tab = browser.new_page(viewport={"width": width, "height": 900})
            for path in sorted(site.rglob("*.html")):
                page = path.relative_to(site).as_posix()
                complaints += [f"{page} ({name}): {fault}" for fault in _faults_of(tab, host, page)]
                if screenshots is not None:
                    screenshots.mkdir(parents=True, exist_ok=True)
                    tab.screenshot(path=screenshots / f"{page.replace('/', '_')}.{name}.png")
            tab.close()
        browser.close()
    return complaints


def _faults_of(tab, host: str, page: str) -> list[str]:
    complaints: list[str] = []
    listeners = {
        "console": lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None,
        "pageerror": lambda error: complaints.append(str(error)),
        "request": lambda request: (
            complaints.append(request.url) if not request.url.startswith((host, "data:", "blob:")) else None
        ),
    }
    for event, listener in listeners.items():
        tab.on(event, listener)
    tab.goto(f"{host}/{page}", wait_until="load")
    wide, window = tab.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    complaints += [fault for check in CHECKS for fault in tab.evaluate(check)]
    for event, listener in listeners.items():
        tab.remove_listener(event, listener)
    return complaints + ([f"{wide} pixels wide in a window of {window}"] if wide > window else [])
