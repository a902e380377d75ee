"""Full tensors one after the other into buckets: one flat buffer of bytes per bucket, in the server's dtype.

Memory during a sync is at most `bucket_bytes` above the model: half for the buffer, which is filled as tensors come and
used again for the next bucket, and half for the tensor just gathered. A tensor above half is a bucket of its own; it is
sent from its own memory, cut into pieces by the transport.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from agrpo.sync.collective import ALIGNMENT


@dataclass(slots=True)
class Bucket:
    """Consecutive tensors as they go out; `flat` [bytes] uint8 holds tensor i from byte `offsets[i]` on."""

    names: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    flat: torch.Tensor | None = None

    def manifest(self) -> dict[str, list]:
        """Names, dtypes and shapes of exactly the tensors in here (SYNC-6)."""
        dtype_names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return {"names": self.names, "dtype_names": dtype_names, "shapes": self.shapes}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by name, as views of the buffer."""
        for name, dtype, shape, start in zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True):
            end = start + math.prod(shape) * dtype.itemsize
            yield name, self.flat[start:end].view(dtype).view(shape)


class Packer:
    """Makes buckets. What it hands out is valid until the next call.

    `is_dense`: tensors follow each other without gaps, for a receiver that knows none; a tensor whose first byte would
    not be a multiple of its element size then begins a new bucket.
    """

    def __init__(self, bucket_bytes: int, device: torch.device | str, *, is_dense: bool = False):
        self.limit, self.device, self.is_dense = max(1, bucket_bytes // 2), device, is_dense
        self.dtype: torch.dtype | None = None  # of the server's weights; None = as they are
        self._buffer: torch.Tensor | None = None
        self._bucket, self._end = Bucket(), 0

    def start(self, dtype_name: str | None) -> None:
        """Begin an update of weights that the server holds in `dtype_name`."""
        self.dtype = getattr(torch, dtype_name) if dtype_name else None
        self._bucket, self._end = Bucket(), 0

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[Bucket]:
        """Take one tensor; yields what must be sent before there is room for it, or because it is large itself."""
        tensor = tensor.detach()
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        num_bytes = tensor.numel() * dtype.itemsize
        if num_bytes > self.limit:
            yield from self.flush()
            whole = tensor.to(self.device, dtype).contiguous().view(-1).view(torch.uint8)
            yield Bucket([name], [dtype], [list(tensor.shape)], [0], whole)
            return
        start = self._start(dtype)
        if start is None or start + num_bytes > self.limit:
            yield from self.flush()
            start = 0
        if self._buffer is None:
            self._buffer = torch.empty(self.limit, dtype=torch.uint8, device=self.device)
        # One pass: copies, casts and moves to the device.
        self._buffer[start : start + num_bytes].view(dtype).view(tensor.shape).copy_(tensor)
        bucket, self._end = self._bucket, start + num_bytes
        bucket.names.append(name)
        bucket.dtypes.append(dtype)
        bucket.shapes.append(list(tensor.shape))
        bucket.offsets.append(start)

    def flush(self) -> Iterator[Bucket]:
        """What is left, if anything is."""
        bucket = self._bucket
        if bucket.names:
            bucket.flat = self._buffer[: self._end]
            yield bucket
        self._bucket, self._end = Bucket(), 0

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer = None
        self._bucket, self._end = Bucket(), 0

    def _start(self, dtype: torch.dtype) -> int | None:
        """Where the next tensor would begin in this bucket; None where it cannot."""
        if not self.is_dense:
            return -(-self._end // ALIGNMENT) * ALIGNMENT
        return self._end if self._end % dtype.itemsize == 0 else None
