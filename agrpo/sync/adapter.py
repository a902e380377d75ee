"""LoRA adapters for servers that serve them: one folder and one name per version, side by side on the server.

    sync of version v, staleness S:   write v beside, rename   load v   unload v-S-1   (its folder goes one sync later)

Nothing is paused: a new adapter touches no running request, and a rollout keeps the version it began with. S + 1 versions
stay registered, so the server needs S + 2 slots. Names are never used twice, not even by a resumed run: servers cache by
name.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agrpo.errors import AgrpoError, ConfigError, ServerError
from agrpo.sync.control import MissingEndpoint, ServerControl
from agrpo.sync.session import SyncTimes, is_proof_due, of_rank_0

if TYPE_CHECKING:
    import torch

    Named = tuple[str, torch.Tensor]

FOLDER = ".vllm_lora"  # below the run's folder
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LIMITS = "it needs rollout.max_staleness + 2 slots (--max-loras) of rank model.lora.r (--max-lora-rank)"
_CLOSE_S = 10.0  # per call when the run ends: a server that hangs then is not waited for
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterNames:
    """The names of one start of a run (LORA-14)."""

    run: str  # the same after a resume, so that leftovers are found
    start: str  # unique per start, so that no name comes twice

    @staticmethod
    def of(run_dir: Path, run_id: str) -> AdapterNames:
        digest = hashlib.blake2b(str(run_dir.absolute()).encode(), digest_size=4).hexdigest()
        return AdapterNames(f"agrpo-{digest}", run_id)

    @property
    def prefix(self) -> str:
        return f"{self.run}-{self.start}"

    def of_version(self, version: int) -> str:
        return adapter_name(self.prefix, version)


def adapter_name(prefix: str, version: int) -> str:
    """What a request for this version names as its model."""
    return f"{prefix}-v{version}"


@dataclass(frozen=True, slots=True)
class Choice:
    """How weights are sent in this run (LORA-2)."""

    sends_adapter: bool
    reason: str


def choose(server: ServerControl, mode: str, lora: Any, merged_only: str | None, max_staleness: int) -> Choice:
    """Adapter or merged weights, by what is trained and what every server serves; rank 0 only.

    `merged_only` names what of the adapter no server can load. Raises where `mode` is lora and the adapter cannot be
    sent, and for servers that serve adapters, but too few, too small ones, or none at runtime (LORA-3 to LORA-8).
    """
    if not lora.enabled:
        return Choice(False, "no adapter is trained")
    if mode == "merged":
        return Choice(False, "sync.mode=merged")
    if merged_only is not None:
        text = f"no server can load an adapter with {merged_only}"
        if mode == "lora":
            raise ConfigError(f"sync.mode=lora: {text}; remove it, or set sync.mode=merged")
        return Choice(False, text)
    for url in server.urls:
        config = server.config_of(url)
        if not config and server.offers(url, LOAD):
            # Outside development mode a server tells nothing of itself; weights could not be sent to it in any case.
            _log.warning("%s does not say how many adapters it holds and of what rank: %s", url, LIMITS)
            continue
        obstacle = _obstacle(config)
        if obstacle is not None:
            if mode == "lora":
                raise ServerError(f"sync.mode=lora: {url} {obstacle}; or set sync.mode=merged")
            return Choice(False, f"{url} {obstacle}")
        _check_limits(server, url, config["lora_config"], lora.r, max_staleness)
    return Choice(True, f"{', '.join(server.urls)} serves adapters")


def _obstacle(config: dict[str, Any]) -> str | None:
    if not config:
        return "neither loads adapters nor says what it serves; start it with VLLM_SERVER_DEV_MODE=1"
    if not config.get("lora_config"):
        return "was started without adapters; start it with --enable-lora"
    size = int((config.get("parallel_config") or {}).get("data_parallel_size") or 1)
    if size > 1:
        return f"has {size} data-parallel engines, of which loading an adapter reaches one; start one server per engine"
    return None


def _check_limits(server: ServerControl, url: str, served: dict[str, Any], rank: int, max_staleness: int) -> None:
    needed = max_staleness + 2
    if int(served["max_lora_rank"]) < rank:
        raise ServerError(
            f"{url} takes adapters up to rank {served['max_lora_rank']}, model.lora.r is {rank}: start it with "
            f"--max-lora-rank {allowed_rank(rank)}, or lower model.lora.r"
        )
    if int(served["max_loras"]) < needed:
        raise ServerError(
            f"{url} has {served['max_loras']} adapter slots, rollout.max_staleness={max_staleness} needs {needed}: start "
            f"it with --max-loras {needed}"
        )
    if not server.offers(url, LOAD):
        raise ServerError(
            f"{url} has no {LOAD}: start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, or set sync.mode=merged"
        )
    if not server.offers(url, "/start_weight_update"):
        _log.warning(
            "%s has no weight transfer: if its base weights differ from model.path, nothing can repair them", url
        )


def allowed_rank(rank: int) -> int:
    """The smallest value of --max-lora-rank that holds `rank`."""
    return next(r for r in (1, 8, 16, 32, 64, 128, 256, 320, 512) if r >= rank)


class AdapterSession:
    """The sender of one trainer rank in adapter mode; same methods as `Session`."""

    def __init__(
        self,
        server: ServerControl,
        names: AdapterNames,
        run_dir: Path,
        write: Callable[[Path, dict[str, torch.Tensor]], None],  # the adapter's files into an existing folder
        *,
        rank: int,
        world_size: int,
        max_staleness: int,
        verify_every: int,
    ):
        self.server, self.names, self.write = server, names, write
        self.root = run_dir.absolute() / FOLDER
        self.rank, self.world_size, self.num_registered = rank, world_size, max_staleness + 1
        self.verify_every, self.num_syncs = verify_every, 0
        self._digests: dict[int, bytes] = {}  # by version: of the weights in its folder
        self._window: list[int] = []  # registered versions, oldest first
        self._leaving: list[int] = []  # unloaded at the last sync; servers may still read their files
        self._served: dict[str, set[str]] = {}  # url -> our adapters there; empty until looked up
        self._is_current, self._dtype = True, None

    @property
    def needs_proof(self) -> bool:
        """True after a sync whose arrival must be proven (SYNC-16); not where a version was loaded again as it was."""
        return self._is_current and is_proof_due(self.num_syncs, self.verify_every)

    def send(self, tensors: Iterable[Named], version: int, barrier: Callable[[], None]) -> SyncTimes:
        """Register the adapter `tensors` as `version`; all ranks call it together."""
        began = time.monotonic()
        barrier()
        met = time.monotonic()
        held = self._gathered(tensors)
        failure, is_current = None, True
        if self.rank == 0:
            try:
                is_current = self._publish(held, version)
            except Exception as error:  # a full disk is an error of the library that writes, and no rank may wait for this one
                cause = str(error) if isinstance(error, AgrpoError | OSError) else f"{type(error).__name__}: {error}"
                failure = f"adapter sync of version {version} failed: {cause}; the server goes on with those it has"
        failure, self._is_current = of_rank_0((failure, is_current), self.world_size)
        if failure is not None:
            raise ServerError(failure)
        self.num_syncs += 1
        ended = time.monotonic()
        return SyncTimes(ended - began, 0.0, met - began, ended - met)

    def reset(self) -> None:
        """Look again at what the servers hold, so that one that was restarted gets every version of the window."""
        self.num_syncs, self._served = 0, {}

    def close(self) -> None:
        """Unload what this run loaded and delete its folder (LORA-14); a server that does not answer is left alone."""
        if self.rank != 0:
            return
        for url, names in self._served.items():
            for name in sorted(names):
                try:
                    self.server.request(url, "POST", UNLOAD, {"lora_name": name}, _CLOSE_S)
                except MissingEndpoint:
                    continue
                except ServerError as error:
                    _log.warning("adapters stay on %s, a resumed run unloads them: %s", url, error)
                    break
        self._served = {}
        shutil.rmtree(self.root, ignore_errors=True)

    def _gathered(self, tensors: Iterable[Named]) -> dict[str, torch.Tensor]:
        held = {}
        for name, tensor in tensors:
            if self.rank == 0:
                held[name] = tensor.detach().to("cpu", copy=True)
        return held

    def _publish(self, tensors: dict[str, torch.Tensor], version: int) -> bool:
        """Write, load, unload, delete; false where `version` is already there with other weights, and stays as it is."""
        if not self._digests:
            shutil.rmtree(self.root, ignore_errors=True)  # of an earlier start; it is a cache, not a checkpoint
        if not self._served:
            self._served = {url: self._look_up(url) for url in self.server.urls}
        is_current = self._write(tensors, version)
        if version not in self._window:
            self._window.append(version)
        self._delete(self._leaving)
        self._leaving = []
        for url in self.server.urls:
            for known in self._window:
                self._load(url, known)
        while len(self._window) > self.num_registered:
            oldest = self._window.pop(0)
            for url in self.server.urls:
                self._unload(url, self.names.of_version(oldest))
            self._leaving.append(oldest)
        return is_current

    def _write(self, tensors: dict[str, torch.Tensor], version: int) -> bool:
        """The version's folder, complete from its first moment (LORA-11), in the server's dtype."""
        import torch

        if self._dtype is None:
            self._dtype = getattr(torch, self.server.dtype_name() or "float32")
        tensors = {name: tensor.to(self._dtype) for name, tensor in tensors.items()}
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(tensors):
            digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
        if version in self._digests:
            return self._digests[version] == digest.digest()
        folder = self._folder(version)
        beside = folder.with_name(f".{folder.name}.tmp")
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        self.write(beside, tensors)
        beside.rename(folder)
        self._digests[version] = digest.digest()
        return True

    def _folder(self, version: int) -> Path:
        return self.root / self.names.of_version(version)

    def _delete(self, versions: list[int]) -> None:
        for version in versions:
            shutil.rmtree(self._folder(version), ignore_errors=True)
            self._digests.pop(version, None)

    def _look_up(self, url: str) -> set[str]:
        """Our adapters on this server; those of an earlier start of this run are unloaded (LORA-14)."""
        entries = self.server.request(url, "GET", "/v1/models")["data"]
        ours = {e["id"] for e in entries if e["id"].startswith(f"{self.names.run}-")}
        mine = {name for name in ours if name.startswith(f"{self.names.prefix}-v")}
        for name in sorted(ours - mine):
            _log.info("%s still has the adapter %s of an earlier start of this run: unloaded", url, name)
            self._unload(url, name)
        return mine

    def _load(self, url: str, version: int) -> None:
        name, served = self.names.of_version(version), self._served[url]
        if name in served:
            return
        folder = self._folder(version)
        try:
            self.server.request(url, "POST", LOAD, {"lora_name": name, "lora_path": str(folder)})
        except ServerError as error:
            if self.num_syncs:
                raise
            raise ServerError(
                f"{error} - {folder} must be on a file system that trainer and server share (run.output_dir)"
            ) from error  # LORA-13
        served.add(name)

    def _unload(self, url: str, name: str) -> None:
        try:
            self.server.request(url, "POST", UNLOAD, {"lora_name": name})
        except MissingEndpoint:
            _log.debug("%s has no adapter %s any more", url, name)
        self._served.get(url, set()).discard(name)
