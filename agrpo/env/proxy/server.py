"""The HTTP server: routes, keys, and errors in the shape that client libraries read.

GET  /v1/models               what a client may ask for; any model name is accepted in a request
POST /v1/chat/completions     chat, with tools and streaming
POST /v1/rl/set_reward        {"interaction_id": id or null, "reward": number}; null = the last interaction
"""

from __future__ import annotations

import functools
import json
import logging
import math
from typing import Any

from aiohttp import web

from agrpo.env.proxy import anthropic, chat, responses
from agrpo.env.proxy.request import Refused
from agrpo.env.proxy.session import Interaction, Session
from agrpo.errors import AgrpoError, RolloutFailure

_log = logging.getLogger(__name__)
_MAX_BODY = 1 << 26  # bytes; a conversation of a long context, as JSON
INTERFACES = {"/v1/chat/completions": chat, "/v1/responses": responses, "/v1/messages": anthropic}
_CONTEXT_EXCEEDED = "prompt_too_long"


class Proxy:
    """Serves the sessions of a run on a free port of the loopback interface."""

    def __init__(self, tokenizer: Any, sampler: Any, max_model_len: int, model_name: str = "agrpo"):
        self._tokenizer, self._sampler, self._max_model_len, self._model_name = (
            tokenizer,
            sampler,
            max_model_len,
            model_name,
        )
        self._sessions: dict[str, Session] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""  # http://127.0.0.1:PORT, set by start

    async def start(self) -> None:
        app = web.Application(client_max_size=_MAX_BODY, middlewares=[_errors])
        app.router.add_get("/v1/models", self._models)
        for path, interface in INTERFACES.items():
            app.router.add_post(path, functools.partial(self._answer, interface))
        for path in ("/v1/rl/set_reward", "/rl/set_reward"):
            app.router.add_post(path, self._set_reward)
        # A handler whose client hangs up is cancelled, so that an answer nobody reads is known as such.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: Session) -> None:
        """Answer requests with this session's key from now on."""
        self._sessions[session.key] = session

    def shut(self, session: Session) -> None:
        self._sessions.pop(session.key, None)

    def _session(self, request: web.Request) -> Session:
        header = request.headers.get("Authorization", "")
        key = header.removeprefix("Bearer ").strip() or request.headers.get("x-api-key", "")
        if key not in self._sessions:
            raise Refused(
                "This key belongs to no rollout in progress; use the api_key that run() was given, while it runs.",
                status=401,
                code="invalid_api_key",
            )
        return self._sessions[key]

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        entry = {"id": self._model_name, "object": "model", "created": 0, "owned_by": "agrpo"}
        return web.json_response({"object": "list", "data": [{**entry, "max_model_len": self._max_model_len}]})

    async def _answer(self, interface: Any, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        asked = interface.parse(await _body(request), self._sampler, session.find)
        async with session.answering(asked.ask, _is_retry(request), interface.PREFIX) as held:
            if asked.stream:
                return await _give(request, held, list(interface.events(asked, held, self._tokenizer)))
            return await _give(request, held, [interface.answer(asked, held, self._tokenizer)])

    async def _set_reward(self, request: web.Request) -> web.Response:
        session, body = self._session(request), await _body(request)
        reward, interaction_id = body.get("reward"), body.get("interaction_id")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise Refused(f"reward must be a finite number, got {reward!r}.", "reward")
        try:
            session.set_reward(interaction_id, reward)
        except KeyError:
            raise Refused(
                f"interaction_id {interaction_id!r} is no answer of this rollout.", "interaction_id"
            ) from None
        return web.json_response({"ok": True})


def _is_retry(request: web.Request) -> bool:
    """Whether the client library says that it sent this request before."""
    count = request.headers.get("x-stainless-retry-count", "0")
    return count.isdigit() and int(count) > 0


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.read())
    except ValueError as error:
        raise Refused(f"the body is no JSON: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object.")
    return body


async def _give(request: web.Request, held: Interaction, parts: list[Any]) -> web.StreamResponse:
    """Write the answer out: one object, or the events of a stream as text.

    It counts as given once its last byte is on its way to a client that still listens.
    """
    is_stream = isinstance(parts[0], str)
    kind = "text/event-stream" if is_stream else "application/json"
    response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
    await response.prepare(request)
    for part in parts:
        await response.write((part if is_stream else json.dumps(part)).encode())
    await response.write_eof()
    held.reached_agent |= request.transport is not None and not request.transport.is_closing()
    return response


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Every failure as {"error": {...}}; a client library is told not to send again what would fail again."""
    try:
        return await handler(request)
    except Refused as refused:
        kind = "authentication_error" if refused.status == 401 else "invalid_request_error"
        return _error(refused.status, refused.text, kind, refused.param, refused.code)
    except RolloutFailure as failure:
        if failure.reason == _CONTEXT_EXCEEDED:
            return _error(400, failure.text, "invalid_request_error", "messages", "context_length_exceeded")
        return _error(502, f"{failure.reason}: {failure.text}", "server_error", None, failure.reason)
    except AgrpoError as error:
        return _error(503, str(error), "server_error", None, None)
    except web.HTTPException as error:
        return _error(
            error.status, f"{request.method} {request.path}: {error.reason}", "invalid_request_error", None, None
        )
    except Exception as error:
        return _error(500, f"{type(error).__name__}: {error}", "server_error", None, None)


def _error(status: int, text: str, kind: str, param: str | None, code: str | None) -> web.Response:
    body = {"type": "error", "error": {"message": text, "type": kind, "param": param, "code": code}}
    return web.json_response(body, status=status, headers={"x-should-retry": "false"})
