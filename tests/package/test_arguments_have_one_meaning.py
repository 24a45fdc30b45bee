"""An argument of one name has one meaning: over the signatures of everything that the chapters export."""

import importlib
import inspect

import pytest

from gradlogz._progress import Progress

CHAPTERS = (
    "measures", "attention", "dynamics", "filters", "contrastive", "probing", "reporting", "simulation", "tracking",
    "integrations",
)  # fmt: skip


def functions():
    """(name, function) of every public function, and of the public methods and constructors of public classes."""
    for chapter in CHAPTERS:
        module = importlib.import_module(f"gradlogz.{chapter}")
        for name, value in vars(module).items():
            if name.startswith("_") or inspect.ismodule(value):
                continue
            if inspect.isfunction(value):
                yield f"{chapter}.{name}", value
            elif inspect.isclass(value):
                for method, function in vars(value).items():
                    if inspect.isfunction(function) and (not method.startswith("_") or method == "__init__"):
                        yield f"{chapter}.{name}.{method}", function


SIGNATURES = {name: inspect.signature(function).parameters for name, function in functions()}


def annotations(argument):
    """The annotations of an argument, by the functions that have it."""
    return {name: p[argument].annotation for name, p in SIGNATURES.items() if argument in p}


def test_progress_is_a_bar_or_a_function_of_done_and_total():
    assert len(annotations("progress")) >= 6
    assert set(annotations("progress").values()) == {Progress}


def test_iterations_are_limited_by_one_name():
    assert set(annotations("max_iterations").values()) == {int}
    for other in ("max_steps", "max_rounds", "rounds", "iterations", "max_iter"):
        assert not {name for name in annotations(other) if not name.endswith("__init__")}, other


def test_keep_says_which_steps_are_reported():
    assert set(annotations("keep")) == {
        f"filters.{n}" for n in ("gpb1", "gpb2", "imm", "gpb", "SwitchingFilter.filter")
    }
    assert len(set(map(str, annotations("keep").values()))) == 1


def test_whole_runs_have_a_seed_and_all_else_a_generator():
    runs = {"probing.probe", "probing.intervene", "simulation.simulate", "simulation.sweep", "tracking.track"}
    runs |= {"probing.propagate", "probing.layer_clouds"}
    assert set(annotations("seed")) == runs
    assert len(set(map(str, annotations("generator").values()))) == 1


@pytest.mark.parametrize("name", SIGNATURES)
def test_no_options_are_untyped(name):
    for p in SIGNATURES[name].values():
        assert p.kind is not p.VAR_KEYWORD or str(p.annotation) != "typing.Any", f"**{p.name}"
