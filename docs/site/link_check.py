"""Check the rendered site as files: links, anchors and resources exist, and nothing is loaded from another host."""

import re
from collections.abc import Iterator
from functools import cache
from html.parser import HTMLParser
from os.path import normpath
from pathlib import Path
from urllib.parse import unquote

LOADED = {"script", "img", "link", "iframe", "source", "video", "audio"}
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:|//")


class _Addresses(HTMLParser):
    """Addresses and anchors of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.addresses: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attributes if value}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        self.addresses += [(tag, values[name]) for name in ("href", "src") if name in values]


@cache
def _read(path: Path) -> _Addresses:
    parser = _Addresses()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def faults(site: Path) -> list[str]:
    """Return one line for each link that leads nowhere and each resource of another host."""
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")  # its links are absolute
    lines = [f"{page.relative_to(site)}: {fault}" for page in pages for fault in _faults_of(site, page)]
    styles = [*site.rglob("*.css"), *site.rglob("*.svg")]
    loads = re.compile(r"(?:url\(|@import\s+)[\"']?https?://[^\"')]+")
    for path in styles:
        lines += [f"{path.relative_to(site)}: {match}" for match in loads.findall(path.read_text(encoding="utf-8"))]
    for path in site.glob("llms.txt"):
        addresses = re.findall(r"^- \[.*?\]\((.*?)\)", path.read_text(encoding="utf-8"), re.MULTILINE)
        lines += [f"llms.txt: no file {address}" for address in addresses if not (site / address).exists()]
    return lines


def _faults_of(site: Path, page: Path) -> Iterator[str]:
    for tag, address in _read(page).addresses:
        if EXTERNAL.match(address):
            if tag in LOADED and not address.startswith("data:"):
                yield f"<{tag}> loads {address}"
            continue
        file, _, anchor = address.partition("#")
        path = Path(normpath(page.parent / unquote(file))) if file else page
        path = path / "index.html" if path.is_dir() else path
        if not path.is_relative_to(site) or not path.exists():
            yield f"no file {address}"
        elif anchor and path.suffix == ".html" and unquote(anchor) not in _read(path).anchors:
            yield f"no anchor {address}"
