"""Uploading a model folder to a hub. The token is the host's login or HF_TOKEN, the address HF_ENDPOINT where it is set."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from pathlib import Path
from typing import Any

from agrpo.errors import AgrpoError

UPLOAD_S = 1500.0  # that training, or the end of the run, waits for an upload that nobody asks it to leave
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
    """`checkpoint.hub` on rank 0. An upload that fails, or is left for later, changes nothing else (RES-17)."""

    def __init__(self, section: Any, run_dir: Path):
        self._section, self._run_dir = section, run_dir
        self.root = run_dir / ".upload"  # for copies that are uploaded and removed
        self._threads: list[threading.Thread] = []
        self._last_step: int | None = None
        self._are_left = False

    def is_due_after_save(self, step: int) -> bool:
        """True once for each step that is saved; the end of a run may save its last step again."""
        is_due = self._section.push == "every_save" and step != self._last_step
        self._last_step = step
        return is_due

    @property
    def is_due_at_end(self) -> bool:
        return self._section.push == "end"

    def start(self, folder: Path, message: str, is_temporary: bool = False) -> None:
        """Upload `folder` in a thread; one that is temporary is removed afterwards."""
        if self.are_under_way() and not self._section.always_push:
            _log.warning("%s is not uploaded: the upload before it is unfinished (checkpoint.hub.always_push=true)", message)
            self._remove(folder, is_temporary)
            return
        thread = threading.Thread(target=self._upload, args=(folder, message, is_temporary), name="upload", daemon=True)
        thread.start()
        self._threads.append(thread)

    def are_under_way(self, wait_s: float = 0.0) -> bool:
        """Whether one still runs, after `wait_s` seconds at most in which one may end."""
        if self._threads:
            self._threads[0].join(wait_s)
        self._threads = [t for t in self._threads if t.is_alive()]
        return bool(self._threads)

    def leave(self) -> None:
        """No upload follows, and what is under way ends with the process: nothing of it is in the repository yet."""
        if not self._are_left:
            _log.warning(
                "not uploaded to %s, since the run is to stop; later: agrpo export %s --push %s",
                self._section.model_id, self._run_dir, self._section.model_id,
            )  # fmt: skip
        self._are_left = True
        self.clear()

    def clear(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def _upload(self, folder: Path, message: str, is_temporary: bool) -> None:
        section = self._section
        try:
            address = upload(
                folder, section.model_id, private=section.private, message=message, revision=section.revision
            )
            _log.info("uploaded: %s", address)
        except Exception as error:  # whatever a client library raises must not end a run that has trained its model
            if self._are_left:
                return
            if isinstance(error, AgrpoError):
                _log.error("%s; the run goes on", error)
            else:
                _log.exception("upload to %s failed; the run goes on", section.model_id)
        finally:
            self._remove(folder, is_temporary)

    @staticmethod
    def _remove(folder: Path, is_temporary: bool) -> None:
        if is_temporary:
            shutil.rmtree(folder, ignore_errors=True)
