"""A communicator of the NCCL library itself, which vLLM's receiver uses too; torch's own groups cannot join one.

Six functions through ctypes: torch brings the library, and creates its communicators from an id that it does not tell,
so a group of torch on this side and vLLM's communicator on the other could never meet.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from pathlib import Path
from typing import Any

import torch

UNIQUE_ID_BYTES = 128
UINT8, FLOAT32, SUM = 1, 7, 0  # ncclDataType_t, ncclRedOp_t


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = [("internal", ctypes.c_byte * UNIQUE_ID_BYTES)]


def load() -> ctypes.CDLL:
    """The library torch uses: already in this process, or in the package that CUDA builds of torch depend on."""
    spec = importlib.util.find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    for path in ["libnccl.so.2", *(str(Path(folder) / "nccl" / "lib" / "libnccl.so.2") for folder in folders)]:
        try:
            return _declared(ctypes.CDLL(path))
        except OSError:
            continue
    raise RuntimeError("libnccl.so.2 was not found; install a CUDA build of torch, or choose sync=gloo")


def _declared(library: ctypes.CDLL) -> ctypes.CDLL:
    pointer, integer, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    library.ncclGetErrorString.restype = ctypes.c_char_p
    library.ncclGetErrorString.argtypes = [integer]
    library.ncclGetUniqueId.argtypes = [ctypes.POINTER(UniqueId)]
    library.ncclCommInitRank.argtypes = [ctypes.POINTER(pointer), integer, UniqueId, integer]
    # sendbuff, recvbuff, count, datatype, op or root, comm, stream
    library.ncclAllReduce.argtypes = [pointer, pointer, size, integer, integer, pointer, pointer]
    library.ncclBroadcast.argtypes = [pointer, pointer, size, integer, integer, pointer, pointer]
    library.ncclCommAbort.argtypes = [pointer]
    return library


def _checked(library: ctypes.CDLL, function: str, *arguments: Any) -> None:
    code = getattr(library, function)(*arguments)
    if code:
        raise RuntimeError(f"{function}: {library.ncclGetErrorString(code).decode()}")


def new_unique_id() -> bytes:
    """What every member needs to know to meet the others; this process listens from now on."""
    library, unique_id = load(), UniqueId()
    _checked(library, "ncclGetUniqueId", ctypes.byref(unique_id))
    return bytes(unique_id.internal)


class Broadcast:
    """A broadcast under way on a stream of its own."""

    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class Communicator:
    """One member; the constructor blocks until all others are there, and cannot be interrupted."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: torch.device | str):
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)
        self._library, self._comm = load(), ctypes.c_void_p()
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream()
            _checked(
                self._library,
                "ncclCommInitRank",
                ctypes.byref(self._comm),
                world_size,
                UniqueId.from_buffer_copy(unique_id),
                rank,
            )
            # vLLM's side does this at once after joining: a member that did not would meet it with a broadcast.
            one = torch.zeros(1, device=self.device)
            with torch.cuda.stream(self._stream):
                self._stream.wait_stream(torch.cuda.default_stream())
                self._call("ncclAllReduce", one, FLOAT32, SUM)
            self._stream.synchronize()

    def size(self) -> int:
        return self.world_size

    def broadcast(self, flat: torch.Tensor, root: int) -> Broadcast:
        """Send or fill the bytes of `flat` [n] uint8, after what the current stream has queued so far."""
        with torch.cuda.device(self.device):
            self._stream.wait_stream(torch.cuda.current_stream())
            self._call("ncclBroadcast", flat, UINT8, root)
            flat.record_stream(self._stream)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Broadcast(event)

    def close(self) -> None:
        """Leave without the others; in a thread, since it waits for kernels whose peers may be gone."""
        comm, self._comm = self._comm, None
        if comm is not None:
            threading.Thread(target=self._library.ncclCommAbort, args=(comm,), name="nccl-abort", daemon=True).start()

    def _call(self, function: str, tensor: torch.Tensor, dtype: int, operation: int) -> None:
        address, stream = tensor.data_ptr(), self._stream.cuda_stream
        _checked(self._library, function, address, address, tensor.numel(), dtype, operation, self._comm, stream)
