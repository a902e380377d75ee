"""How the supervisor and the trainer ask a server: directly, and never for longer than they said."""

import contextlib
import http.server
import socket
import threading
import time

import pytest

from agrpo.errors import ServerError
from agrpo.launch.server import health, is_labelled, weight_label
from agrpo.sync.control import ServerControl


@contextlib.contextmanager
def served(handle):
    """The address of a listener on loopback whose every connection goes to `handle`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    peer, _ = listener.accept()
                    threading.Thread(target=handle, args=(peer,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def drip(head: bytes):
    """The head of an answer, then a byte now and then, for ever."""

    def handle(peer: socket.socket) -> None:
        with contextlib.suppress(OSError):
            peer.recv(4096)
            peer.sendall(head)
            while True:
                time.sleep(0.05)
                peer.sendall(b"x")

    return handle


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nX-Long: ", b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n"])
def test_a_server_that_drips_byte_by_byte_holds_nobody_up(head):
    with served(drip(head)) as url:
        began = time.monotonic()
        assert "no answer: " in health(url, limit_s=0.3)
        assert weight_label(url, limit_s=0.3) is None
        with pytest.raises(ServerError, match=r"GET .*/health: no answer within 0.3 s; raise server.timeout|BadStatusLine"):
            ServerControl((url,), 0.3).request(url, "GET", "/health")
        assert time.monotonic() - began < 5.0


def test_no_proxy_of_the_environment_stands_between_a_run_and_its_server(monkeypatch):
    class Well(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"weight_version": "7"}')

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Well)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert health(url) == "healthy" and weight_label(url) == "7" and is_labelled(url)
    finally:
        server.shutdown()
        server.server_close()
