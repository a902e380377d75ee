"""A loopback server that answers what vLLM 0.32 answers about itself; a test changes one answer at a time."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tokenizers import Tokenizer

from tests.standins import QUICKSTART

TOKENS = Tokenizer.from_file(str(QUICKSTART / "tokenizer.json"))
SILENT = "silent"  # a status: the request is never answered
# As /server_info?config_format=json of vLLM 0.32 reports it, shortened to what is read.
INFO = {
    "vllm_config": {
        "model_config": {
            "dtype": "torch.float32", "max_logprobs": 20, "logprobs_mode": "processed_logprobs", "return_sampling_mask": False,
        },
        "lora_config": None,
        "weight_transfer_config": {"backend": "gloo"},
        "parallel_config": {"data_parallel_size": 1, "_api_process_count": 8},
        "device_config": {"device": "cuda"},
    },
    "vllm_env": {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": 120},
}  # fmt: skip


class FactsServer:
    """`answers[path]` is (status, value); what is not there is 404. GET of a path that takes POST is 405."""

    def __init__(self, url: str):
        self.url = url
        self.info = copy.deepcopy(INFO)
        entry = {"id": str(QUICKSTART), "root": str(QUICKSTART), "parent": None, "max_model_len": 512}
        adapter = {"id": "adapter", "root": "/a", "parent": str(QUICKSTART), "max_model_len": 11}
        self.answers: dict[str, tuple[Any, Any]] = {
            "/health": (200, None),
            "/version": (200, {"version": "0.32.0"}),
            "/v1/models": (200, {"data": [adapter, entry]}),
            "/server_info": (200, self.info),
            "/is_paused": (200, {"is_paused": False}),
            "/get_world_size": (200, {"world_size": 1}),
            "/metrics": (200, "vllm:num_requests_running 0"),
            "/inference/v1/generate": (400, {"error": {"message": "token_ids: field required"}}),
            **{path: (405, None) for path in ("/start_weight_update", "/collective_rpc")},
        }
        self.num_tokens = TOKENS.get_vocab_size()
        self.shift = 0  # of every token id, as another tokenizer would have it
        self.lora_answer: tuple[int, Any] = (404, {"error": {"message": "No adapter found for /x"}})

    @property
    def entry(self) -> dict[str, Any]:
        """The base model's."""
        return self.answers["/v1/models"][1]["data"][1]

    def answer(self, path: str, body: Any) -> tuple[Any, Any]:
        if path == "/tokenize":
            ids = TOKENS.encode(body["prompt"], add_special_tokens=False).ids
            return 200, {"tokens": [i + self.shift for i in ids]}
        if path == "/v1/completions":
            known = max(body["prompt"]) < self.num_tokens
            return (200, {"choices": []}) if known else (400, {"error": {"message": "Token id is out of vocabulary"}})
        if path == "/v1/load_lora_adapter" and body is not None:
            return self.lora_answer
        return self.answers.get(path, (404, {"detail": "Not Found"}))


@contextlib.contextmanager
def facts_server() -> Iterator[FactsServer]:
    released = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.give(None)

        def do_POST(self) -> None:
            self.give(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def give(self, body: Any) -> None:
            status, value = facts.answer(self.path.split("?")[0], body)
            if status == SILENT:
                released.wait(30)
                status = 503
            if isinstance(status, float):  # seconds of waiting, once
                facts.answers[self.path.split("?")[0]] = (200, value)
                time.sleep(status)
                status = 200
            content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    facts = FactsServer(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield facts
    finally:
        released.set()
        server.shutdown()
        server.server_close()
