"""The pages that Zensical renders, assembled in a folder of their own.

    docs/**/*.md               as they are, but for links and formulas
    docs/reference.md          one page for each chapter
    docs/notebooks/*.ipynb     pages with the outputs of their cells
    CHANGELOG.md, ...          files of the repository root
    llms.txt                   a list of all pages, each with its first sentence

A link to a file of the repository becomes the name of the file, because the site does not contain it. Formulas are
written as on GitHub, in ```math blocks and as $`x`$, and become MathML, which browsers render without a script. A
product <x, y> is text on GitHub and is kept as text here.
"""

import re
import shutil
import tomllib
from collections.abc import Callable
from html import escape
from os.path import normpath, relpath
from pathlib import Path

import notebook_pages
from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
LINK = re.compile(r"(!?)\[([^][]*(?:\[[^]]*\][^][]*)*)\]\(([^)\s]+)\)")
FENCED = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
MATH = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LONG = 24  # characters of a name in a table
PROSE = 60  # characters of a cell that is read as a sentence
PARAGRAPH = 320  # characters of a cell that no column can hold
MARKUP = re.compile(r"<[^>]*>|(?<=\])\([^)]*\)")  # tags, and the addresses of links
NOT_TEXT = re.compile(rf"(<code.*?</code>|{MARKUP.pattern})")
TABLE_ROW = re.compile(r"^ *\|.*$", re.MULTILINE)
TABLE = re.compile(r"^\|.*\|\n\|[-:| ]+\|\n(?:\|.*\|(?:\n|\Z))+", re.MULTILINE)
WORD = re.compile(r"[\w./]{25,}")
CODE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
ANY_CODE = re.compile(r"(^ *```.*?^ *```$|(?<!`)`[^`]+`(?!`))", re.DOTALL | re.MULTILINE)
CODE_TAG = re.compile(r"<code([^>]*)>([^<>]+)(?=</code>)")
TAG = re.compile(r"""</?[A-Za-z][\w-]*(\s+[A-Za-z_][\w:-]*(\s*=\s*("[^"]*"|'[^']*'))?)*\s*/?>""")  # as in CommonMark
OPENING = re.compile(r"<(?=[A-Za-z/])")
SIZES = re.compile(r"\d( [x±] [\d.]+)+|\(\d+(, \d+)+\)")  # 8 x 64, 0.9 ± 0.1, (1, 8, 64)
COLUMNS = re.compile(r"(?<!\\)\|")
PICTURE = re.compile(r"^!\[([^]]+)\]\(((?:\.\./)*pictures/\S+)\)$", re.MULTILINE)
INLINE_MATH = re.compile(r"\$`([^`\n]+)`\$")


def assemble(target: Path, *, outputs: bool) -> list[str]:
    """Write all pages below `target`, and return the links that lead nowhere."""
    shutil.rmtree(target, ignore_errors=True)
    sources = [*DOCS.rglob("*.md"), *DOCS.rglob("*.ipynb"), *(ROOT / name for name in ROOT_PAGES)]
    pages = {path.relative_to(ROOT).as_posix(): page_of(path) for path in sorted(sources)}
    faults = []
    for source, page in pages.items():
        path = ROOT / source
        if path.suffix == ".ipynb":
            text = notebook_pages.markdown(path, target / Path(page).parent, run=outputs)
        else:
            text = path.read_text(encoding="utf-8")
        text, broken = relinked(typeset(text), source, pages, target)
        faults += broken
        text = with_captions(with_breaks(with_lists(text)))
        for name, part in parts_of(page, text).items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).write_text(part, encoding="utf-8")
    shutil.copytree(DOCS / "pictures", target / "pictures")
    shutil.copytree(DOCS / "site" / "style", target / "style")
    faults += outside_navigation(target)
    (target / "llms.txt").write_text(llms(target), encoding="utf-8")
    return faults


def page_of(source: Path) -> str:
    """Path of a page in the site: below docs/ as there, from the root in small letters."""
    if source.is_relative_to(DOCS):
        return source.relative_to(DOCS).with_suffix(".md").as_posix()
    return source.name.lower()


def typeset(text: str) -> str:
    """Replace formulas by MathML."""
    text = outside_code(text, with_products)
    text = MATH.sub(lambda match: f"<div>{convert(match[1].strip(), display='block')}</div>", text)
    return INLINE_MATH.sub(lambda match: convert(match[1]), text)


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """Apply a function to the text between blocks of code and between code in backticks."""
    pieces = ANY_CODE.split(text)  # every second piece is code
    return "".join(piece if i % 2 else change(piece) for i, piece in enumerate(pieces))


def with_products(text: str) -> str:
    """Write `<` of a product <x, y> as an entity: Python-Markdown takes it for a tag, and browsers hide it."""
    return OPENING.sub(lambda match: "<" if TAG.match(text, match.start()) else "&lt;", text)


def relinked(text: str, source: str, pages: dict[str, str], target: Path) -> tuple[str, list[str]]:
    """Lead links of a page to other pages of the site; files of the repository become code with their path."""
    faults = []
    here = Path(pages[source]).parent

    def link(match: re.Match) -> str:
        picture, label, address = match.groups()
        file, _, anchor = address.partition("#")
        if not file or re.match(r"[a-z]+:", address):
            return match[0]
        path = normpath((Path(source).parent / file).as_posix())
        if path in pages:
            return f"{picture}[{label}]({relpath(pages[path], here)}{'#' + anchor if anchor else ''})"
        if path.startswith("docs/pictures/"):
            return f"{picture}[{label}]({relpath(path.removeprefix('docs/'), here)})"
        if (target / here / file).exists():  # a figure of a tutorial
            return match[0]
        if not (ROOT / path).exists():
            faults.append(f"{source}: no file {address}")
        return f'<code title="{path}">{label.strip("`")}</code>'

    pieces = FENCED.split(text)  # every second piece is code
    return "".join(piece if i % 2 else LINK.sub(link, piece) for i, piece in enumerate(pieces)), faults


def with_lists(text: str) -> str:
    """Replace tables of at least three columns with a cell of more than PARAGRAPH characters by a list for each row."""

    def entry(headings: list[str], row: list[str]) -> str:
        items = [
            f"- *{heading}*: {cell}" for heading, cell in zip(headings[1:], row[1:], strict=True) if cell.strip("–")
        ]
        return f"**{row[0]}**\n\n" + "\n".join(items) + "\n"

    def table(match: re.Match) -> str:
        lines = [[cell.strip() for cell in COLUMNS.split(line)[1:-1]] for line in match[0].strip().splitlines()]
        longest = max(len(MARKUP.sub("", cell)) for line in lines for cell in line)
        if longest <= PARAGRAPH or len(lines[0]) < 3:
            return match[0]
        return "\n".join(entry(lines[0], line) for line in lines[2:]).replace("\\|", "|")

    pieces = FENCED.split(text)
    return "".join(piece if i % 2 else TABLE.sub(table, piece) for i, piece in enumerate(pieces))


def with_breaks(text: str) -> str:
    """Say where the cells of tables may break, since browsers on a phone break wherever they can.

    Names of more than LONG characters break after a slash, a dot or an underscore, other words and sizes between words.
    Cells of more than PROSE characters get a class, for which the style sheet has a least width.
    """

    def breaking(name: str) -> str:
        return re.sub(r"(?<=[/._])(?=[a-z])", "<wbr>", name)

    def code(match: re.Match) -> str:
        attributes, name = match.groups()
        if len(name) > LONG:
            name = breaking(name)
        elif " " not in name:
            attributes += ' class="name"'
        for sign in "_*|":  # Python-Markdown looks for emphasis and columns in a tag, too
            name = name.replace(sign, f"&#{ord(sign)};")
        return f"<code{attributes}>{name}"

    def plain(text: str) -> str:
        text = SIZES.sub(lambda size: size[0].replace(" ", "\N{NO-BREAK SPACE}"), text)
        pieces = NOT_TEXT.split(text)  # every second piece is code, a tag or an address
        return "".join(
            piece if i % 2 else WORD.sub(lambda word: breaking(word[0]), piece) for i, piece in enumerate(pieces)
        )

    def cell(words: str) -> str:
        words = outside_code(words, plain)
        words = CODE.sub(lambda match: f"<code>{escape(match[1], quote=False)}</code>".replace("\\|", "|"), words)
        words = CODE_TAG.sub(code, words)
        is_long = len(MARKUP.sub("", words)) > PROSE
        return f' <span class="prose">{words.strip()}</span> ' if is_long else words

    def row(line: re.Match) -> str:
        return "|".join(cell(words) for words in COLUMNS.split(line[0]))

    pieces = FENCED.split(text)
    return "".join(piece if i % 2 else TABLE_ROW.sub(row, piece) for i, piece in enumerate(pieces))


def with_captions(text: str) -> str:
    """Make a figure of a picture that stands alone: its text is the caption, and a click opens the picture itself."""

    def figure(match: re.Match) -> str:
        caption, address = match.groups()
        return f"<figure markdown>\n\n[![{caption}]({address})]({address})\n\n{caption}\n{{ .caption }}\n\n</figure>"

    pieces = FENCED.split(text)
    return "".join(piece if i % 2 else PICTURE.sub(figure, piece) for i, piece in enumerate(pieces))


def parts_of(page: str, text: str) -> dict[str, str]:
    """Pages that a source becomes: one, or one for each heading of the reference with a list of them."""
    if page != "reference.md":
        return {page: text}
    opening, *chapters = re.split(r"^## ", text, flags=re.MULTILINE)
    parts, contents = {}, []
    for chapter in chapters:
        heading, _, body = chapter.partition("\n")
        name = f"reference/{re.sub(r'[^a-z]+', '_', heading.lower())}.md"
        parts[name] = f"# {heading}\n{body}"
        contents.append(f"- [{heading}]({name})")
    return {page: opening + "\n".join(contents) + "\n", **parts}


def navigation() -> list[tuple[str, str]]:
    """Return (title, page) in the order of the navigation, external links left out."""
    entries = []

    def collect(items: list) -> None:
        for item in items:
            for title, value in item.items():
                collect(value) if isinstance(value, list) else entries.append((title, value))

    collect(tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"])
    return entries


def outside_navigation(target: Path) -> list[str]:
    """Pages without an entry in the navigation, and entries without a page."""
    listed = {page for _, page in navigation()}
    written = {path.relative_to(target).as_posix() for path in target.rglob("*.md")}
    absent = [f"zensical.toml: {page} is not in nav; add a line to its chapter" for page in sorted(written - listed)]
    return absent + [f"zensical.toml: nav lists {page}, which does not exist" for page in sorted(listed - written)]


def llms(target: Path) -> str:
    """List of all pages for language models (llmstxt.org): title, address and first sentence."""
    lines = ["# gradlogz", "", "> Softmax attention is the gradient of the log normaliser of an exponential family."]
    lines += ["> A PyTorch library and a command line built on this identity.", "", "## Pages", ""]
    for title, page in navigation():
        if (target / page).exists():
            sentence = first_sentence((target / page).read_text(encoding="utf-8"))
            address = page.replace("README.md", "index.md").removesuffix(".md")  # as Zensical names it
            lines.append(f"- [{title}]({address}.html): {sentence}")
    return "\n".join(lines) + "\n"


def first_sentence(text: str) -> str:
    """First sentence of the first paragraph of prose, without a label in bold."""
    for paragraph in text.split("\n\n"):
        if re.match(r"\s*[A-Z`*\[<]", paragraph) and not paragraph.startswith(("```", "<!--", "<figure")):
            prose = re.sub(r"^\*\*[^*]*\.\*\* ", "", " ".join(paragraph.split()))
            prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", prose)
            prose = re.sub(r"</?code[^>]*>|[*`]", "", prose).replace("&lt;", "<")
            return re.split(r"(?<=[.])\s", prose)[0]
    return "Generated from the docstrings."
