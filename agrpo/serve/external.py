"""A server that somebody else starts and stops: only its address is known here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from agrpo.schema import setting


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

    def problems(self, config: Any) -> list[str]:
        wrong = [url for url in self.urls if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc]
        if wrong or not self.urls:
            shown = wrong[0] if wrong else repr(self.base_url)
            return [f"server.base_url must be an address such as http://localhost:8000, got {shown}"]
        return []
