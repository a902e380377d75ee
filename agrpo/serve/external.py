"""A server that somebody else starts and stops: only its address is known here."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agrpo.schema import setting
from agrpo.serve.flags import ServerCommand, server_command
from agrpo.serve.vllm import Vllm, is_installed


@dataclass(frozen=True, slots=True, kw_only=True)
class External:
    """Uses running servers at `base_url`; several are given with commas between them."""

    base_url: str = setting("http://localhost:8000", "address of the server, or several with commas between them")
    timeout: float = setting(1800.0, "seconds to become healthy, and limit of each request and weight sync", gt=0)
    model_name: str | None = setting(None, "name under which the server serves the model; null = model.path")
    parity_limit: float | None = setting(0.2, "largest mean log-prob difference to the trainer; null = no check", gt=0)

    managed = False
    wants_gpu = False

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(url.strip().rstrip("/") for url in self.base_url.split(",") if url.strip())

    @property
    def is_elsewhere(self) -> bool:
        """Whether some server is on another machine."""
        return not all(map(_is_local, self.urls))

    def problems(self, config: Any) -> list[str]:
        wrong = [url for url in self.urls if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc]
        if wrong or not self.urls:
            shown = wrong[0] if wrong else repr(self.base_url)
            return [f"server.base_url must be an address such as http://localhost:8000, got {shown}"]
        return []

    def standalone(self, run_dir: Path, config: Any, num_gpus: int) -> list[ServerCommand]:
        """What to start at each address: the server that server=vllm would start for this configuration."""
        settings = Vllm(timeout=self.timeout, parity_limit=self.parity_limit)
        if self.model_name not in (None, config.model.path):
            settings = replace(settings, arguments=["--served-model-name", self.model_name])
        # Where vllm is not installed here, the line is for another environment, whose Python has no known path.
        python = sys.executable if is_installed() else "python"
        commands = []
        for url in self.urls:
            parts = urlsplit(url)
            port, host = parts.port or (443 if parts.scheme == "https" else 80), "127.0.0.1" if _is_local(url) else "0.0.0.0"
            command = server_command(settings, config, port, num_gpus, python, host)
            commands.append(replace(command, url=url))
        return commands


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
