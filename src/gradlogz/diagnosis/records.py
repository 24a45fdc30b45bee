"""Records of a diagnosis."""

from typing import NamedTuple

from .packages import NeededPackage


class ServedCall(NamedTuple):
    """The kernel that serves a call on a device, with its error, and its time in units of another's.

    Args:
        kernel: name of the kernel of the forward pass, and of the backward pass if it differs.
        passes: the error is within the tolerance of the dtype.
        ratio: time / time of the rival, and `again` the same of the rival with itself.
    """

    call: str
    device: str
    kernel: str
    error: float
    passes: bool
    ratio: float
    again: float
    rival: str


class Device(NamedTuple):
    """A device of PyTorch, in words."""

    name: str
    description: str


class Diagnosis(NamedTuple):
    """Versions, packages by extra, devices, and the calls that were measured on each."""

    versions: dict[str, str]
    packages: list[NeededPackage]
    devices: list[Device]
    calls: list[ServedCall]

    @property
    def passes(self) -> bool:
        """True if every kernel computes what its definition says."""
        return all(call.passes for call in self.calls)
