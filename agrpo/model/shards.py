"""Reading the shards of a checkpoint, which may be a stranger's: torch unpickles their index with whatever it names."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

# All that torch writes into an index; exact names, since a module's own imports are among its attributes.
_NAMES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "MetadataIndex", "ChunkStorageMetadata", "BytesStorageMetadata", "TensorStorageMetadata", "TensorProperties",
        "StorageMeta", "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "collections": {"OrderedDict"},
}  # fmt: skip


class ShardReader(FileSystemReader):
    """As torch's, but its index can only describe tensors; UnpicklingError for one that names anything else."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        with (self.path / ".metadata").open("rb") as file:
            metadata = _Index(file).load()
        metadata.storage_meta = metadata.storage_meta or torch.distributed.checkpoint.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Index(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in _NAMES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its index names {module}.{name}, which is no part of a checkpoint")
