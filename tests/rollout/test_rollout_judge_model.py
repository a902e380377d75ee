"""A judge model asked by an async reward function or inside `generate_one` gives the same totals (LOOP-17)."""

import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.rollout import judge_samples
from tests.rollout.loop_harness import done, produce


def verdict(text):
    return sum(map(int, text.split())) % 97 / 97


class JudgeModel(BaseHTTPRequestHandler):
    def do_GET(self):
        [text] = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)["text"]
        self.server.asked.append(text)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(str(verdict(text)).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def asked(monkeypatch):
    server = ThreadingHTTPServer(("127.0.0.1", 0), JudgeModel)
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv(judge_samples.URL, f"http://127.0.0.1:{server.server_port}")
    yield server.asked
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "way",
    [
        {"loop_class": judge_samples.Judged, "reward": None},
        {"functions": ["tests.rollout.judge_samples.judged"]},
    ],
    ids=["inside generate_one", "reward function"],
)
def test_both_ways_give_the_judges_total(url, tmp_path, asked, way):
    trainer = produce(url, tmp_path, done(6), **way)
    seen = 0
    for group in trainer.ready:
        for reward, sample in zip(group.rewards, group.samples, strict=True):
            text = " ".join(map(str, sample.token_ids[sample.loss_mask].tolist()))
            assert text in asked
            assert reward == pytest.approx(verdict(text), abs=1e-6)
            seen += 1
    assert seen >= 6 and len({r for g in trainer.ready for r in g.rewards}) > 3
