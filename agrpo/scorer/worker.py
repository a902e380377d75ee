"""One worker process: executes one reward function on one group at a time, and is killed when that takes too long.

Frames on the socket: 8 bytes of length, 4 bytes of function index (requests only), then a pickle. Both ends are processes
of the same run; nothing here reads from a network. Imports the standard library only, to be ready in milliseconds.
"""

from __future__ import annotations

import faulthandler
import pickle
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO

from agrpo.errors import ContractError
from agrpo.lifecycle import die_with_parent
from agrpo.scorer.contract import Request, checked, keywords
from agrpo.scorer.entries import EntryError, resolve

REQUEST = struct.Struct(">QI")  # length of the pickle, index of the function
REPLY = struct.Struct(">Q")  # length of the pickle


def main() -> None:
    die_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # asked for when the run stalls; goes to the log
    with socket.socket(fileno=int(sys.argv[1])) as channel, channel.makefile("rwb") as stream:
        channel.set_inheritable(False)  # a program started by a function must not keep the channel open
        named = _read(stream, REQUEST)
        if named is None:
            return
        try:
            functions = [(name, resolve(entry)) for name, entry in pickle.loads(named[1])]
        except EntryError as error:
            return _write(stream, ("refused", str(error)))
        _write(stream, ("ready",))
        while request := _read(stream, REQUEST):
            _write(stream, execute(*functions[request[0]], pickle.loads(request[1])))


def execute(name: str, function: Callable, request: Request) -> tuple[Any, ...]:
    """("ok", values, seconds), ("contract", text), or ("raised", text, traceback)."""
    started = time.perf_counter()
    try:
        values = function(**keywords(request))
        return "ok", checked(name, values, len(request.completions)), time.perf_counter() - started
    except ContractError as error:
        return "contract", str(error)
    except BaseException as error:  # sys.exit() in a reward is a fault of the reward, not the end of the worker
        return "raised", f"reward function {name} raised {type(error).__name__}: {error}", traceback.format_exc()


def _read(stream: BinaryIO, header: struct.Struct) -> tuple[int, bytes] | None:
    """Function index and pickle; None when the other end is gone."""
    head = stream.read(header.size)
    if len(head) < header.size:
        return None
    length, index = header.unpack(head)
    body = stream.read(length)
    return (index, body) if len(body) == length else None


def _write(stream: BinaryIO, message: tuple[Any, ...]) -> None:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    stream.write(REPLY.pack(len(body)))
    stream.write(body)
    stream.flush()


if __name__ == "__main__":
    main()
