"""A hash of everything that a table of the `datasets` library holds, about as fast as its bytes can be hashed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from agrpo.data.rows import digest

BATCH_ROWS = 1024  # files cut their tables elsewhere; the hash is of these batches


def content_digest(dataset: Any) -> str:
    """Of all values by column name; the same for any order of columns, any file format and any width of its types."""
    batches = dataset.with_format("arrow").iter(batch_size=BATCH_ROWS)
    return digest(*(digest(*_parts(batch)).encode() for batch in batches))


def _parts(batch: Any) -> Iterator[bytes | memoryview]:
    for name in sorted(batch.column_names):
        yield name.encode()
        column = batch.column(name).combine_chunks()
        # Depends on the version of pyarrow: one array, or chunks of which there is one.
        for array in getattr(column, "chunks", [column]):
            yield from _of(array)


def _of(array: Any) -> Iterator[bytes | memoryview]:
    """An arrow array as bytes: lengths of what varies (-1 = null), then what it holds."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_null(kind):
        yield _numbers(pc.fill_null(array.cast(pa.int64()), -1))
    elif any(is_it(kind) for is_it in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)):
        data = array.cast(pa.large_binary())
        yield _numbers(pc.fill_null(pc.binary_length(data), -1))
        yield _joined(data.drop_null())
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        yield _numbers(pc.fill_null(pc.list_value_length(array), -1).cast(pa.int64()))
        yield from _of(array.flatten())
    elif pa.types.is_struct(kind):
        yield _numbers(array.is_valid().cast(pa.int64()))
        # Flattening gives each field the nulls of the struct that holds it.
        for name, field in sorted(zip((f.name for f in kind), array.flatten(), strict=True), key=lambda pair: pair[0]):
            if field.null_count < len(field):  # a table adds empty fields where other rows have them
                yield name.encode()
                yield from _of(field)
    elif pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_floating(kind):
        yield _numbers(array.is_valid().cast(pa.int64()))
        wide = array.cast(pa.float64() if pa.types.is_floating(kind) else pa.int64(), safe=False)
        yield _numbers(pc.fill_null(wide, 0))
    else:
        yield json.dumps(array.to_pylist(), sort_keys=True, default=str).encode()


def _joined(values: Any) -> memoryview:
    """The bytes of all values, without a copy: they lie one after the other between the first offset and the last."""
    _, offsets, held = values.buffers()
    first, last = np.frombuffer(offsets, np.int64)[[values.offset, values.offset + len(values)]] if len(values) else (0, 0)
    return memoryview(held or b"")[first:last]


def _numbers(array: Any) -> bytes:
    return array.to_numpy(zero_copy_only=False).tobytes()
