"""Predictions in files of the user: `gradlogz probe --prediction FILE`.

The file is Python and is run, so that only files that the user names are read. It defines PREDICTION, as the files of
predictions/ do.

Read next: prediction.py (the form of a file), run_probe.py (which takes the result).
"""

import sys
import traceback
from collections.abc import Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from .._errors import InputTypeError, InputValueError
from .prediction import Prediction
from .predictions import known_predictions

FOLDER = "gradlogz_own_predictions"  # prefix of module names, so that no installed module is replaced


def selected(names: Sequence[str] | None, files: Sequence[str]) -> list[Prediction]:
    """Return the predictions of this package and of the files; only those with these names, unless None.

    A name may be a list of names separated by commas. Names that leave out the prediction of a file are an error.
    """
    known = {prediction.name: prediction for prediction in known_predictions()}
    files_of: dict[str, str] = {}
    for file in files:
        prediction = prediction_in(file)
        if prediction.name in known:
            problem = f"--prediction {file}: there is another prediction named {prediction.name!r}"
            raise InputValueError("probe", "--prediction", problem, "Rename the file.")
        known[prediction.name], files_of[prediction.name] = prediction, file
    if names is None:
        return list(known.values())
    wanted = list(dict.fromkeys(name.strip() for each in names for name in each.split(",") if name.strip()))
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        problem = f"there is no prediction named {unknown[0]!r}" if unknown else "--only names no prediction"
        raise InputValueError("probe", "--only", problem, f"Choose from {', '.join(known)}.")
    left_out = [name for name in files_of if name not in wanted]
    if left_out:
        problem = f"--only leaves out {left_out[0]!r}, the prediction of --prediction {files_of[left_out[0]]}"
        raise InputValueError("probe", "--only", problem, "Add its name to --only.")
    return [known[name] for name in wanted]


def prediction_in(file: str | Path) -> Prediction:
    """Run a Python file and return its PREDICTION, which has the name of the file."""
    path = Path(file).expanduser()
    if path.suffix != ".py" or not path.is_file() or not path.stem.isidentifier():
        problem = f"--prediction must be an existing Python file whose name is an identifier, got {str(file)!r}"
        raise InputValueError("probe", "--prediction", problem, "Name a file such as long_queries.py.")
    name = f"{FOLDER}.{path.stem}"
    specification = spec_from_file_location(name, path)
    assert specification is not None  # every .py file has a loader
    assert specification.loader is not None
    module = module_from_spec(specification)
    sys.modules[name] = module  # dataclasses and pickle look a class up in its module
    try:
        specification.loader.exec_module(module)
    except Exception as error:  # any error of the user's code, shown with its place in the file
        del sys.modules[name]
        problem = f"{path.name} is not importable ({_place(error, path)}{_first_line(error)})"
        raise InputValueError(
            "probe", "--prediction", problem, "Correct the file; python FILE runs it alone."
        ) from None
    prediction = getattr(module, "PREDICTION", None)
    if not isinstance(prediction, Prediction):
        problem = f"{path.name} must define PREDICTION, a Prediction, got {type(prediction).__name__}"
        remedy = "End the file with PREDICTION = Prediction(__name__, ...)."
        raise InputTypeError("probe", "--prediction", problem, remedy)
    return prediction


def _place(error: Exception, path: Path) -> str:
    """Line of the file at which an error arose, "line 12, "; empty if it arose elsewhere."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f"line {error.lineno}, "
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"line {lines[-1]}, " if lines else ""


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].rstrip('.')[:160]}" if lines else type(error).__name__
