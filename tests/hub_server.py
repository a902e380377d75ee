"""A loopback HTTP server that takes uploads as a Hugging Face hub does: repositories, and commits of small files.

`commits` holds (repository, summary, {path: bytes}) of each commit; `refuses` makes it answer 403,
`refuses_commit` where the summary of a commit ends with it. Where `stalls`, every file goes to its store for large ones,
which sets `is_storing` and answers nothing before `close`.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Hub:
    def __init__(self):
        self.repositories, self.commits, self.tokens = {}, [], []
        self.refuses, self.refuses_commit = False, None
        self.stalls, self.is_storing, self.is_closed = False, threading.Event(), threading.Event()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.handle_any(b"")

            def do_POST(self):
                hub.tokens.append(self.headers.get("Authorization"))
                self.handle_any(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

            def do_PUT(self):
                hub.is_storing.set()
                hub.is_closed.wait(120)

            def handle_any(self, body):
                status, answer = (403, {"error": "no right to write"}) if hub.refuses else hub.answer(self.path, body, self.url())
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def url(self):
                return f"http://127.0.0.1:{self.server.server_port}"

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path, body, url):
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.repositories[name] = asked
            return 200, {"url": f"{url}/{name}", "name": name}
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/preupload/([\w.%-]+)", path):
            files, mode = json.loads(body)["files"], "lfs" if self.stalls else "regular"
            return 200, {"files": [{"path": f["path"], "uploadMode": mode, "shouldIgnore": False} for f in files]}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [{**o, "actions": {"upload": {"href": f"{url}/store/{o['oid']}"}}} for o in json.loads(body)["objects"]]
            return 200, {"transfer": "basic", "objects": objects}
        if match := re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commit/([\w.%-]+)(\?.*)?", path):
            lines = [json.loads(line) for line in body.splitlines() if line]
            header = next(line["value"] for line in lines if line["key"] == "header")
            if self.refuses_commit is not None and header["summary"].endswith(self.refuses_commit):
                return 403, {"error": "no right to write"}
            files = {line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"}
            self.commits.append((match[1], header["summary"], files))
            return 200, {"commitUrl": f"{url}/{match[1]}/commit/{'0' * 40}", "commitOid": "0" * 40}
        if match := re.match(r"/api/models/([\w.-]+/[\w.-]+)(/revision/[\w.-]+)?", path):
            return 200, {"id": match[1], "sha": "0" * 40, "siblings": []}
        return 404, {"error": path}

    def close(self):
        self.is_closed.set()
        self.server.shutdown()
        self.server.server_close()
