"""Full tensors one after the other into buckets, in the server's dtype.

Memory during a sync is at most `bucket_bytes` above the model: half for the bucket, whose buffer is filled as tensors
come and used again for the next one, and half for the tensor just gathered. A tensor above half is a bucket of its own.
Large tensors that need no cast are not copied: their own memory is a piece of the bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from agrpo.sync.collective import ALIGNMENT

DIRECT_BYTES = 1 << 20  # smaller tensors are cheaper to copy than to send one by one


@dataclass(slots=True)
class Bucket:
    """Consecutive tensors as they go out: tensor i is the bytes from `offsets[i]` on.

    Piece j holds the bytes from `starts[j]` on, [n] uint8; between pieces there may be a few bytes that belong to none.
    """

    names: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    pieces: list[torch.Tensor] = field(default_factory=list)

    def manifest(self) -> dict[str, list]:
        """Names, dtypes and shapes of exactly the tensors in here (SYNC-6)."""
        dtype_names = [str(dtype).removeprefix("torch.") for dtype in self.dtypes]
        return {"names": self.names, "dtype_names": dtype_names, "shapes": self.shapes}

    def spans(self) -> list[list[int]]:
        """[start, end) of each piece in bytes."""
        return [[start, start + len(piece)] for start, piece in zip(self.starts, self.pieces, strict=True)]

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors by name, as views of the pieces."""
        i = 0
        for name, dtype, shape, offset in zip(self.names, self.dtypes, self.shapes, self.offsets, strict=True):
            while offset >= self.starts[i] + len(self.pieces[i]) and i + 1 < len(self.pieces):
                i += 1
            start = offset - self.starts[i]
            yield name, self.pieces[i][start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


class Packer:
    """Makes buckets. What it hands out is valid until the next call.

    `is_dense`: tensors follow each other without gaps, for a receiver that knows none; a tensor whose first byte would
    not be a multiple of its element size then begins a new bucket.
    """

    def __init__(
        self, bucket_bytes: int, device: torch.device | str, *, is_dense: bool = False, longest: int | None = None
    ):
        self.limit = max(1, min(bucket_bytes // 2, longest or bucket_bytes))
        self.device, self.is_dense = torch.device(device), is_dense
        self.dtype: torch.dtype | None = None  # of the server's weights; None = as they are
        self._buffer: torch.Tensor | None = None
        self._bucket, self._end, self._copied_to = Bucket(), 0, 0

    def start(self, dtype_name: str | None) -> None:
        """Begin an update of weights that the server holds in `dtype_name`."""
        self.dtype = getattr(torch, dtype_name) if dtype_name else None
        self._bucket, self._end, self._copied_to = Bucket(), 0, 0

    def add(self, name: str, tensor: torch.Tensor) -> Iterator[Bucket]:
        """Take one tensor; yields what must be sent before there is room for it, or because it is large itself."""
        tensor = tensor.detach()
        dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
        num_bytes = tensor.numel() * dtype.itemsize
        if num_bytes > self.limit:
            yield from self.flush()
            self._take(name, dtype, tensor, 0, _bytes_of(tensor.to(self.device, dtype).contiguous()))
            yield from self.flush()
            return
        offset = self._offset(dtype)
        if offset is None or offset + num_bytes > self.limit:
            yield from self.flush()
            offset = 0
        if self._is_direct(tensor, dtype, num_bytes):
            self._take(name, dtype, tensor, offset, _bytes_of(tensor))
        else:
            self._copy(name, dtype, tensor, offset, num_bytes)
        self._end = offset + num_bytes

    def flush(self) -> Iterator[Bucket]:
        """What is left, if anything is."""
        bucket, self._bucket = self._bucket, Bucket()
        self._end = self._copied_to = 0
        if bucket.names:
            yield bucket

    def close(self) -> None:
        """Give the buffer back."""
        self._buffer = None
        self._bucket, self._end, self._copied_to = Bucket(), 0, 0

    def _is_direct(self, tensor: torch.Tensor, dtype: torch.dtype, num_bytes: int) -> bool:
        is_ready = tensor.dtype == dtype and tensor.device == self.device and tensor.is_contiguous()
        return is_ready and num_bytes >= DIRECT_BYTES and not self.is_dense

    def _copy(self, name: str, dtype: torch.dtype, tensor: torch.Tensor, offset: int, num_bytes: int) -> None:
        """Into the buffer at its place, in one pass that also casts and moves; what is copied in a row is one piece."""
        if self._buffer is None:
            self._buffer = torch.empty(self.limit, dtype=torch.uint8, device=self.device)
        end = offset + num_bytes
        self._buffer[offset:end].view(dtype).view(tensor.shape).copy_(tensor)
        bucket = self._bucket
        if bucket.pieces and self._copied_to == self._end:
            start = bucket.starts.pop()
            bucket.pieces.pop()
        else:
            start = offset
        self._take(name, dtype, tensor, offset, self._buffer[start:end], start)
        self._copied_to = end

    def _take(
        self, name: str, dtype: torch.dtype, tensor: torch.Tensor, offset: int, piece: torch.Tensor, start: int = -1
    ) -> None:
        bucket = self._bucket
        bucket.names.append(name)
        bucket.dtypes.append(dtype)
        bucket.shapes.append(list(tensor.shape))
        bucket.offsets.append(offset)
        bucket.starts.append(offset if start < 0 else start)
        bucket.pieces.append(piece)

    def _offset(self, dtype: torch.dtype) -> int | None:
        """Where the next tensor would begin in this bucket; None where it cannot."""
        if not self.is_dense:
            return -(-self._end // ALIGNMENT) * ALIGNMENT
        return self._end if self._end % dtype.itemsize == 0 else None


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
