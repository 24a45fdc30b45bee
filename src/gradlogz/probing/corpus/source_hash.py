"""Hash of a source of text or images, to tell whether two runs read the same.

Read next: text.py (the source), ../../commands/checkpoint_runs.py (which keeps the runs of the same text).
"""

import hashlib
import platform

from ..._paths import user_path


def source_hash(source: str | None) -> str:
    """Return the sha256 of the names and contents of a file or folder; None is the text bundled with Python."""
    digest = hashlib.sha256()
    if source is None:
        digest.update(f"help topics of Python {platform.python_version()}".encode())
        return digest.hexdigest()
    path = user_path("documents", "source", source)
    for file in [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file()):
        name = file.relative_to(path.parent).as_posix()
        digest.update(f"{name}\0{file.stat().st_size}\0".encode(errors="surrogateescape"))  # a name may be no UTF-8
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
