"""`checkpoint.hub` in a run: what is uploaded and when, and how long the ranks wait for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agrpo.config import Config
from agrpo.errors import ServerError
from agrpo.model import checkpoint as checkpoints
from agrpo.model.hub import UPLOAD_S, Uploads
from agrpo.train.ranks import Ranks

_log = logging.getLogger(__name__)


class Pushes:
    """One rank's part; rank 0 uploads. Every method is called on all ranks together."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        ranks: Ranks,
        beat: Callable[[str], None],
        is_asked_to_stop: Callable[[], bool],
    ):
        self._section, self._run_dir, self._ranks, self._beat = config.checkpoint.hub, run_dir, ranks, beat
        self._dtype = checkpoints.export_dtype(config.model)
        self._is_asked_to_stop = is_asked_to_stop
        self._uploads = Uploads(self._section, run_dir)
        if ranks.is_first:
            self._uploads.clear()  # what a run that was killed meanwhile left

    def after_save(self, step: int, name: str, model: Any, tokenizer: Any) -> None:
        """The model of the checkpoint `name`, where that is due; a disk that has no room for a copy of it ends nothing."""
        if not self._uploads.is_due_after_save(step):
            return
        if self._ranks.tell(self._is_asked_to_stop()):
            if self._ranks.is_first:
                self._uploads.leave()
            return
        copy = self._uploads.root / name
        try:
            checkpoints.export_merged(model, tokenizer, copy, self._dtype)
            if self._ranks.is_first:
                self._uploads.start(copy, f"{self._section.commit_message}, {name}", is_temporary=True)
        except ServerError as error:  # of rank 0, which writes
            _log.error("%s is not uploaded: %s", name, error)
        if self._section.blocking:
            self.wait()

    def at_end(self) -> None:
        """The exported model, where that is due."""
        if not self._uploads.is_due_at_end:
            return
        if self._ranks.is_first:
            self._uploads.start(self._run_dir / "model", self._section.commit_message)
        if self._section.blocking:
            self.wait()

    def wait(self) -> None:
        """Until nothing is under way, `UPLOAD_S` seconds at most. A signal ends the wait: everything else is saved by now.

        All ranks look up together, since an upload may take longer than a collective call.
        """
        deadline = time.monotonic() + UPLOAD_S
        while self._ranks.tell(self._is_awaited(deadline) if self._ranks.is_first else 0):
            self._beat("uploading")

    def _is_awaited(self, deadline: float) -> bool:
        if not self._uploads.are_under_way(1.0):
            return False
        if self._is_asked_to_stop():
            self._uploads.leave()
            return False
        if time.monotonic() > deadline:
            _log.error("an upload to %s is not through after %g s; going on without it", self._section.model_id, UPLOAD_S)
            return False
        return True
