"""Refuse words that a reader of this package would have to decode.

    prose        sources, documentation and templates: phrases of PHRASES, with the word to use instead
    docstrings   no fragment that opens with Of, What, Whether, That or The same
    names        no variable or argument called found, given, kept, whole, own, told, said, seen or of

The words to use are in docs/terminology.md. A line with a true use of a phrase carries the escape `plain-words: ok`, in
a comment of its language.

    python tools/plain_words.py [PATH ...]
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ESCAPE = "plain-words: ok"
FOLDERS = ("src", "docs", "tools", "examples", "experiments", "benchmarks")
PLACES = (*FOLDERS, "README.md", "CHANGELOG.md", "CONTRIBUTING.md")
SUFFIXES = {".py", ".pyi", ".md", ".html", ".js", ".css", ".cu", ".toml"}
EXEMPT = {"docs/terminology.md", "tools/plain_words.py"}  # they list the words

PHRASES = {
    r"\bmiddle (head|layer|depth|one|sublayer|value|cosine|attention)s?\b": "median over heads (layers)",
    r"\btold\b": "a technical verb: reported, given, known",
    r"\btwins?\b": "random-weights baseline",
    r"\bplaces? of rest\b": "fixed point, equilibrium",
    r"\bis what it claims\b": "is consistent (NIS, NEES)",
    r"\bfor and against\b": "support and refute",
    r"\bis no work of training\b": "is not an effect of training",
    r"\bintervals? of 95 ?%": "95 % confidence interval (CI)",
    r"\bthe same where the claim says nothing\b": "null value",
    r"\bwho sees whom\b": "which candidates each anchor is compared with",
    r"\bundecided\b": "inconclusive",
    r"\bspeaks? of\b": "describes, contains",
    r"(?m)^(?:[-*>|]\s+|\d+\.\s+)?Of (?!course)": "a sentence that begins with its subject",
}
OPENINGS = re.compile(r"(Of|What|Whether|That|The same)\b(?! course)")
NAMES = {"found", "given", "kept", "whole", "own", "told", "said", "seen", "of"}


def files(arguments: list[str]) -> Iterator[Path]:
    """Yield the text files below the paths given, or below all places that people read."""
    for place in arguments or PLACES:
        path = (ROOT / place).resolve()
        every = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (p for p in every if p.suffix in SUFFIXES and p.relative_to(ROOT).as_posix() not in EXEMPT)


def phrases(text: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers and complaints about phrases."""
    for number, line in enumerate(text.splitlines(), start=1):
        if ESCAPE in line:
            continue
        for pattern, instead in PHRASES.items():
            if (match := re.search(pattern, line)) is not None:
                yield number, f'"{match[0].strip()}": say {instead}'


def docstrings_and_names(text: str) -> Iterator[tuple[int, str]]:
    """Yield line numbers and complaints about docstrings and names of Python code."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            opening = OPENINGS.match(ast.get_docstring(node) or "")
            if opening is not None:
                yield node.body[0].lineno, f'docstring opens with "{opening[0]}": say what is returned or done'
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)):
            name = node.arg if isinstance(node, ast.arg) else node.id
            if name in NAMES and ESCAPE not in lines[node.lineno - 1]:
                yield node.lineno, f'name "{name}": use a noun of the subject'


def main(arguments: list[str]) -> int:
    """Print every complaint and return 1 if there is one."""
    count = 0
    for path in files(arguments):
        text = path.read_text(encoding="utf-8")
        complaints = list(phrases(text))
        if path.suffix in {".py", ".pyi"}:
            complaints += docstrings_and_names(text)
        for number, complaint in sorted(complaints):
            print(f"{path.relative_to(ROOT)}:{number}: {complaint}")
        count += len(complaints)
    print(f"plain words: {count} to rewrite" if count else "plain words: none to rewrite")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
