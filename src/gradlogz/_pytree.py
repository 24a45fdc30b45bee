"""Frozen records of tensors, registered as pytrees for torch's transforms.

    children    tensor fields and record fields, in the order of their declaration; fields that are None are dropped
    context     names of the fields present, and the values of `static_field()` fields

Unflattening skips `__init__` and its checks, since inside a transform the children may be tensors of other shapes, or
objects that are not tensors.

Law: tests/laws/test_measures_are_pytrees.py.
"""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import torch.utils._pytree as pytree

C = TypeVar("C", bound=type)
R = TypeVar("R")


def static_field(*, default: Any = dataclasses.MISSING, kw_only: bool = False) -> Any:
    """Declare a field that is not a tensor: part of the structure of the pytree."""
    return dataclasses.field(default=default, kw_only=kw_only, metadata={"static": True})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static_field, dataclasses.field))
def record(cls: C) -> C:
    """Make a class a frozen dataclass and a pytree; its `_free` lists the names of the child fields."""
    dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields]
    fixed = [f.name for f in fields if f.metadata.get("static")]
    free = tuple(name for name in names if name not in fixed)
    type.__setattr__(cls, "_free", free)

    def flatten(self: Any) -> tuple[list[Any], Any]:
        live = tuple(name for name in free if getattr(self, name) is not None)
        return [getattr(self, name) for name in live], (live, tuple(getattr(self, name) for name in fixed))

    def unflatten(children: Any, context: Any) -> Any:
        live, constants = context
        self: Any = object.__new__(cls)
        values = (
            dict.fromkeys(names) | dict(zip(live, children, strict=True)) | dict(zip(fixed, constants, strict=True))
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)
        return self

    pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=f"gradlogz.{cls.__qualname__}")
    return cls


def replaced(record: R, **changes: Any) -> R:
    """Copy a record with changed fields, without the checks and conversions of its constructor."""
    copy = object.__new__(type(record))
    copy.__dict__.update(record.__dict__ | changes)
    return copy
