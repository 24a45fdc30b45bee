"""The table that kernels read names the fields of `Filtered`, in their order and with their dimensions."""

from typing import get_type_hints

from gradlogz.filters import Filtered
from gradlogz.kernels.filters.fields import FIELDS


def test_the_table_has_the_fields_of_filtered_in_their_order():
    assert (*FIELDS, "log_likelihood") == Filtered._fields


def test_the_table_has_the_dimensions_of_filtered():
    annotated = get_type_hints(Filtered, include_extras=True)
    for name, field in FIELDS.items():
        lead, *dimensions = annotated[name].dim_str.split()
        assert lead == "*b"
        assert "".join(dimensions) == field.shape, name
