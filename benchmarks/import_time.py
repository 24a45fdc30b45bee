"""Time of `import gradlogz` compared with `import torch`, and of `gradlogz --help`."""

import subprocess
import sys
from collections.abc import Callable

from timing import compare

EVERYTHING = "import torch, gradlogz; [getattr(gradlogz, name) for name in gradlogz.__all__]"


def python(code: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def rows() -> list[dict]:
    help_text = "import sys; sys.argv = ['gradlogz', '--help']; from gradlogz.cli import main; main()"
    seconds = compare(
        {
            "import torch": python("import torch"),
            "import torch, jaxtyping": python("import torch, jaxtyping"),
            "import torch, gradlogz (every name)": python(EVERYTHING),
            "import gradlogz (lazily)": python("import gradlogz"),
            "gradlogz --help": python(help_text),
            "python": python("pass"),
        },
        rounds=9,
    )
    torch = seconds["import torch"]
    return [{"what": k, "seconds": round(v, 3), "beside_torch": round(v - torch, 3)} for k, v in seconds.items()]
