"""Folders that are written beside their place, get their name whole, and leave it whole, whenever the machine stops."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
from pathlib import Path

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE


def replace(folder: Path, beside: Path) -> None:
    """Give `beside` the name `folder`, at whose place there is a whole folder all the time."""
    if folder.exists() and _exchanged(folder, beside):
        before = beside
    else:
        before = folder.with_name(f".{folder.name}.replaced")
        shutil.rmtree(before, ignore_errors=True)
        if folder.exists():  # on a file system that exchanges no names, `folder` is missing for a moment
            folder.rename(before)
        beside.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(before, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete `folder`, which is no longer there under its name before its first file goes."""
    hidden = folder.with_name(f".{folder.name}.removed")
    shutil.rmtree(hidden, ignore_errors=True)
    folder.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def settle(folder: Path) -> None:
    """Return once every file in `folder` would survive a loss of power; a rename may reach the disk before the data."""
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    # Some network file systems refuse it for folders.
    with contextlib.suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def _exchanged(one: Path, other: Path) -> bool:
    """Whether the two names were exchanged in one operation; not every system and file system can."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0
