"""Uploading a model folder to a hub. The token is the host's login or HF_TOKEN, the address HF_ENDPOINT where it is set."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agrpo.errors import AgrpoError

UPLOAD_S = 1500.0  # that training, or the end of the run, waits for an upload
_log = logging.getLogger(__name__)


def upload(
    folder: Path, repo: str, *, private: bool | None = None, message: str = "agrpo", revision: str | None = None
) -> str:
    """Upload every file of `folder`, creating repository and branch where they are missing; the commit's address.

    AgrpoError in one line where it fails; the folder stays as it is.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        raise AgrpoError(f"upload to {repo}: HF_HUB_OFFLINE is set; unset it. The folder {folder} is complete")
    api = HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        found = api.upload_folder(folder_path=folder, repo_id=repo, commit_message=message, revision=revision)
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError, ValueError, *_network_errors()) as error:
        text = " ".join(str(error).split())
        raise AgrpoError(f"upload to {repo} failed: {text}; the folder {folder} is complete") from error
    return str(found.commit_url)


def _network_errors() -> tuple[type[Exception], ...]:
    """What a hub that cannot be reached raises; older clients go by requests, whose errors are OSErrors."""
    try:
        import httpx
    except ImportError:
        return ()
    return (httpx.HTTPError,)


class Uploads:
    """`checkpoint.hub` in a run; rank 0 uploads. An upload that fails is logged and changes nothing else (RES-17)."""

    def __init__(self, section: Any):
        self._section = section
        self._threads: list[threading.Thread] = []
        self._last_step: int | None = None

    def is_due_after_save(self, step: int) -> bool:
        """True once for each step that is saved; the end of a run may save its last step again."""
        is_due = self._section.push == "every_save" and step != self._last_step
        self._last_step = step
        return is_due

    @property
    def is_due_at_end(self) -> bool:
        return self._section.push == "end"

    def start(self, folder: Path, message: str, beat: Callable[[str], None], is_temporary: bool = False) -> None:
        """Upload `folder`, and wait for that where it is `blocking`; a folder that is temporary is removed afterwards."""
        self._threads = [t for t in self._threads if t.is_alive()]
        if self._threads and not self._section.always_push:
            _log.warning("%s is not uploaded: the upload before it is unfinished (checkpoint.hub.always_push=true)", message)
            self._clear(folder, is_temporary)
            return
        thread = threading.Thread(target=self._upload, args=(folder, message, is_temporary), name="upload", daemon=True)
        thread.start()
        self._threads.append(thread)
        if self._section.blocking:
            self.finish(beat)

    def _upload(self, folder: Path, message: str, is_temporary: bool) -> None:
        section = self._section
        try:
            address = upload(
                folder, section.model_id, private=section.private, message=message, revision=section.revision
            )
            _log.info("uploaded: %s", address)
        except AgrpoError as error:
            _log.error("%s; the run goes on", error)
        except Exception:  # whatever a client library raises must not end a run that has trained its model
            _log.exception("upload to %s failed; the run goes on", section.model_id)
        finally:
            self._clear(folder, is_temporary)

    @staticmethod
    def _clear(folder: Path, is_temporary: bool) -> None:
        if is_temporary:
            shutil.rmtree(folder, ignore_errors=True)

    def finish(self, beat: Callable[[str], None]) -> None:
        """Wait for uploads under way, `UPLOAD_S` seconds in all; what is unfinished then is left to itself."""
        for _ in range(int(UPLOAD_S)):
            self._threads = [t for t in self._threads if t.is_alive()]
            if not self._threads:
                return
            beat("uploading")
            self._threads[0].join(1.0)
        _log.error("an upload to %s is not through after %g s; going on without it", self._section.model_id, UPLOAD_S)
