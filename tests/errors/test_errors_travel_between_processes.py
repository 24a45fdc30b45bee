"""An error raised in a worker process arrives with its type, message, call and argument."""

import copy
import pickle

import pytest

from gradlogz import _errors

KINDS = [kind for kind in vars(_errors).values() if isinstance(kind, type) and issubclass(kind, _errors.InputError)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("travel", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy])
def test_a_pickled_error_is_the_same(kind, travel):
    error = kind("imm", "F", "F must be symmetric, but its asymmetry is 0.3", "Pass (F + F.mT) / 2.")
    arrived = travel(error)
    assert type(arrived) is kind
    assert str(arrived) == str(error) == "imm: F must be symmetric, but its asymmetry is 0.3. Pass (F + F.mT) / 2."
    assert (arrived.call, arrived.argument) == ("imm", "F")
