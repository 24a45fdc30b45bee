"""What the tests of Triton kernels share."""

import pytest


@pytest.fixture
def bounds_of_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 in its interpreter makes a number of an array of one element, as numpy 2.4 no longer does (#9171)."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
