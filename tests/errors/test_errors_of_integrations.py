"""Integrations say which package or argument is missing."""

import sys
import warnings
from unittest import mock

import pytest

import gradlogz.integrations
from gradlogz.attention import MonitorRow, Thresholds
from gradlogz.integrations import LoopMonitor, heat_map, save_checkpoint
from support.error_form import each_of, refused
from support.small_trainings import GPT, batches, train


def without_accelerate():
    hidden = {"accelerate": None, "gradlogz.integrations.accelerate_loop": None}
    with mock.patch.dict(sys.modules, hidden):
        del sys.modules["gradlogz.integrations.accelerate_loop"]
        return gradlogz.integrations.AccelerateMonitor


def nowhere_to_save():
    model = GPT()
    options = {"every": 1, "thresholds": Thresholds(logit=0.01), "actions": [save_checkpoint]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with LoopMonitor(model, **options):
            train(model, batches(1))


ERRORS = [
    (ImportError, "AccelerateMonitor: accelerate", "installed", without_accelerate),
    (ValueError, "LoopMonitor: save", "save_checkpoint", nowhere_to_save),
    (ValueError, "heat_map: statistic", "max_logit", lambda: heat_map(MonitorRow(0, {}, ()), "kind")),
]


@each_of(ERRORS)
def test_errors_name_the_argument(refusal):
    refused(refusal)


def test_an_unknown_name_is_refused_as_by_any_module():
    with pytest.raises(AttributeError, match="KerasMonitor"):
        gradlogz.integrations.KerasMonitor  # noqa: B018
