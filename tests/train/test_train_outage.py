"""How rank 0 tells a server that was started again from one that lives, with a server on loopback that can go and come."""

import http.server
import json
import threading
import time

import pytest

from agrpo.errors import ServerError
from agrpo.sync.control import ServerControl
from agrpo.train.outage import Outage
from agrpo.train.ranks import Ranks

FAILURE = ServerError("weight sync of version 3 failed at transfer: connection reset")


class LabelledServer:
    """Answers /weight_info, /update_weight_version and /health; `start` again gives the label of a new server."""

    def __init__(self):
        self.port, self.takes_claims, self._http = 0, True, None

    def start(self) -> None:
        self.label, server = "default", self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, {"weight_version": server.label} if self.path == "/weight_info" else {})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if server.takes_claims:
                    server.label = body["new_version"]
                self._answer(200 if server.takes_claims else 405, {})

            def _answer(self, status: int, body: dict) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

            def log_message(self, *args: object) -> None:
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def server():
    server = LabelledServer()
    server.start()
    yield server
    server.stop()


def make_outage(server, timeout_s=20.0, is_asked_to_stop=lambda: False):
    control = ServerControl([f"http://127.0.0.1:{server.port}"], timeout_s)
    return Outage(control, Ranks(use_cpu=True, timeout_s=10), lambda phase: None, is_asked_to_stop)


def test_a_restart_is_seen_whenever_it_happens(server):
    outage = make_outage(server)
    assert outage.claim() and server.label == "claimed" and outage.num_restarts == 0  # the first sync of the run
    assert not outage.is_over() and not outage.claim()
    server.label = "1"  # the sync is complete
    assert not outage.is_over() and not outage.claim()
    server.stop()
    assert not outage.is_over()
    server.start()
    assert outage.is_over() and outage.claim() and outage.num_restarts == 1 and server.label == "claimed"
    server.stop()  # in the middle of that sync
    server.start()
    assert outage.is_over() and outage.claim() and outage.num_restarts == 2


def test_a_server_that_cannot_be_claimed_counts_as_one_without_labels(server):
    server.takes_claims = False
    outage = make_outage(server)
    assert outage.claim() and not outage.is_over() and not outage.claim()


def test_a_failure_of_a_server_that_lives_is_a_failure(server):
    outage = make_outage(server)
    for label in ("claimed", "3"):  # in the first sync of the run, and in a later one
        server.label = label
        with pytest.raises(ServerError) as raised:
            outage.wait_out(FAILURE)
        assert raised.value is FAILURE


def test_an_outage_is_waited_out(server):
    outage = make_outage(server)
    outage.claim()
    server.stop()
    timer = threading.Timer(1.0, server.start)
    timer.start()
    began = time.monotonic()
    outage.wait_out(FAILURE)
    timer.join()
    assert 0.9 < time.monotonic() - began < 10 and outage.claim()


def test_the_wait_has_an_end(server):
    server.stop()
    with pytest.raises(ServerError, match="reset; no server came back within 0.6 s; raise server.timeout"):
        make_outage(server, timeout_s=0.6).wait_out(FAILURE)
    with pytest.raises(ServerError) as raised:
        make_outage(server, is_asked_to_stop=lambda: True).wait_out(FAILURE)
    assert raised.value is FAILURE
    server.start()


def test_a_server_that_starts_again_before_the_first_sync_is_waited_for(server):
    outage = make_outage(server, timeout_s=5.0)
    outage.await_up()
    server.stop()
    timer = threading.Timer(0.7, server.start)
    timer.start()
    outage.await_up()
    timer.join()
    server.stop()
    with pytest.raises(ServerError, match="no answer; no server came back within 0.3 s"):
        make_outage(server, timeout_s=0.3).await_up()
    server.start()
