"""Blocking HTTP calls of trainer rank 0 to the generation servers: pause, weight updates, and the proof of arrival.

Every call has a limit and its error names method, URL, status and the server's own text (SYNC-10). With several servers
a call goes to all of them; nothing is retried here, because a repeated weight update is not the same update.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlencode, urlsplit

from agrpo.errors import ServerError

MAX_ERROR_TEXT = 2000  # characters of a server's answer shown to the user


class Refused(ServerError):
    """The server answered with an error status."""


class MissingEndpoint(Refused):
    """The endpoint does not exist at this server (SRV-17)."""


class ServerControl:
    """The control side of one or more servers that hold the same model."""

    def __init__(self, urls: Sequence[str], timeout_s: float):
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.timeout_s = timeout_s

    def request(self, url: str, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """One call to one server; returns the decoded JSON answer, {} for an empty one. Raises ServerError."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        where = f"{method} {url}{path}"
        try:
            status, text = exchange(url, method, path, limit, body)
        except TimeoutError as error:
            raise ServerError(f"{where}: no answer within {limit:g} s; raise server.timeout") from error
        except (OSError, http.client.HTTPException) as error:
            raise ServerError(f"{where}: {type(error).__name__}: {error}") from error
        if status >= 400:
            # vLLM answers 403 on the token endpoint where it was started without the flag that its answer names.
            is_missing = status == 404 or (status == 403 and "--enable-scale-out" in text)
            kind = MissingEndpoint if is_missing else Refused
            raise kind(f"{where} answered {status}: {_error_text(text)}")
        return _decoded(text)

    def offers(self, url: str, path: str) -> bool:
        """True if this server has the endpoint; a GET of one that takes only POST answers 405, a missing one 404."""
        try:
            self.request(url, "GET", path)
        except MissingEndpoint:
            return False
        except Refused:
            pass
        return True

    def begin(self, path: str, bodies: Sequence[Any]) -> list[Future]:
        """Start one POST per server, each in a daemon thread; a hung server cannot keep the process alive."""
        calls = []
        for url, body in zip(self.urls, bodies, strict=True):
            future: Future = Future()
            threading.Thread(target=self._run, args=(future, url, path, body), name=f"post{path}", daemon=True).start()
            calls.append(future)
        return calls

    def _run(self, future: Future, url: str, path: str, body: Any) -> None:
        try:
            future.set_result(self.request(url, "POST", path, body))
        except BaseException as error:
            future.set_exception(error)

    def post(self, path: str, body: Any = None) -> list[Any]:
        """POST to all servers and wait for all answers; the first error is raised."""
        if len(self.urls) == 1:
            return [self.request(self.urls[0], "POST", path, body)]
        return [call.result() for call in self.begin(path, [body] * len(self.urls))]

    def is_paused(self) -> bool:
        """True if any server is paused; a server that cannot tell counts as running."""
        try:
            return any(self.request(url, "GET", "/is_paused").get("is_paused", False) for url in self.urls)
        except MissingEndpoint:
            return False

    def pause(self, clear_cache: bool) -> None:
        """Stop generation and keep the running requests (SYNC-3)."""
        self.post("/pause?" + urlencode({"mode": "keep", "clear_cache": "true" if clear_cache else "false"}))

    def resume(self) -> None:
        """Let the servers generate again; asked twice before it fails, since asking twice does no harm."""
        try:
            self.post("/resume")
        except ServerError:
            self.post("/resume")

    def start_update(self) -> None:
        """Begin an update; one that a sender left open when it died is broken off first."""
        try:
            self.post("/start_weight_update", {})
        except ServerError as error:
            if "already active" not in str(error):
                raise
            # vLLM ends an update only by finishing it, or by an update call that fails: this one cannot succeed.
            for call in self.begin("/update_weights", [{"update_info": {}}] * len(self.urls)):
                call.exception(timeout=self.timeout_s)
            self.post("/start_weight_update", {})

    def finish_update(self, version: int) -> None:
        """Declare the received weights complete, with the label that answers will carry (SYNC-14)."""
        self.post("/finish_weight_update", {"weight_version": str(version)})

    def set_version(self, version: int) -> None:
        """Label weights that came without an update call; a server that knows no labels is left without (SYNC-14)."""
        try:
            self.post("/update_weight_version", {"new_version": str(version)})
        except MissingEndpoint:
            return

    def reload_weights(self, path: str | None) -> None:
        """Load a folder; None = the model the server was started with."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path} if path else {}})

    def world_sizes(self) -> list[int]:
        """Number of processes of each server that take part in a transfer."""
        sizes = []
        for url in self.urls:
            try:
                sizes.append(int(self.request(url, "GET", "/get_world_size")["world_size"]))
            except MissingEndpoint:
                sizes.append(1)
        return sizes

    def dtype_name(self) -> str | None:
        """Weight dtype of the server (`float32`), or None if it does not say."""
        dtype = self.config_of(self.urls[0]).get("model_config", {}).get("dtype")
        return str(dtype).removeprefix("torch.") if dtype else None

    def config_of(self, url: str) -> dict[str, Any]:
        """The configuration that a server reports, by section; {} outside development mode."""
        try:
            return self.request(url, "GET", "/server_info?config_format=json").get("vllm_config") or {}
        except MissingEndpoint:
            return {}

    def generate(self, url: str, token_ids: Sequence[int], model: str | None, params: dict[str, Any]) -> dict:
        """Sample one answer; a choice as of /inference/v1/generate, from /v1/completions where only that is offered."""
        named = {} if model is None else {"model": model}
        body = {"token_ids": list(token_ids), "request_id": "weight-proof", "sampling_params": params, **named}
        try:
            return self.request(url, "POST", "/inference/v1/generate", body)["choices"][0]
        except MissingEndpoint:
            as_ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
            body = {"prompt": list(token_ids), **params, **as_ids, **named}
            return _with_content(self.request(url, "POST", "/v1/completions", body)["choices"][0])


def exchange(url: str, method: str, path: str, limit_s: float, body: Any = None) -> tuple[int, str]:
    """Status and text of one call, which goes to the server itself whatever proxy the environment names.

    TimeoutError after `limit_s` seconds in all, also where single bytes keep arriving; OSError or HTTPException.
    """
    parts = urlsplit(url)
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = connect(parts.hostname or "localhost", parts.port, timeout=limit_s)
    payload = None if body is None else json.dumps(body).encode()
    headers = {} if payload is None else {"Content-Type": "application/json"}
    is_late = threading.Event()
    try:
        connection.connect()
        timer = threading.Timer(limit_s, _cut, (connection.sock, is_late))
        timer.daemon = True
        timer.start()
        try:
            connection.request(method, parts.path + path, payload, headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
        finally:
            timer.cancel()
    except (OSError, http.client.HTTPException) as error:
        if is_late.is_set():
            raise TimeoutError("timed out") from error
        raise
    finally:
        connection.close()
    if is_late.is_set():  # what ends with the connection is read as if it were whole
        raise TimeoutError("timed out")
    return answer.status, text


def _cut(connection: socket.socket, is_late: threading.Event) -> None:
    """The limit of the socket itself begins anew with every byte."""
    is_late.set()
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _with_content(choice: dict) -> dict:
    """A choice of /v1/completions with its log-probs in the form of /inference/v1/generate."""
    logprobs, content = choice["logprobs"], []
    for token, value, top in zip(
        choice["token_ids"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        ranked = sorted(top.items(), key=lambda item: -item[1])
        others = [{"token_id": int(name.removeprefix("token_id:")), "logprob": v} for name, v in ranked]
        content.append({"token_id": token, "logprob": value, "top_logprobs": others})
    return {**choice, "logprobs": {"content": content}}


def _decoded(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError:
        return {"text": text}


def _error_text(text: str) -> str:
    """The message of an error body, or the body itself, shortened."""
    decoded = _decoded(text)
    error = decoded.get("error", decoded) if isinstance(decoded, dict) else decoded
    message = error.get("message", error.get("detail")) if isinstance(error, dict) else None
    return (str(message) if message else text.strip() or "empty answer")[:MAX_ERROR_TEXT]
