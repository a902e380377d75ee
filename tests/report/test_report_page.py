"""`agrpo report`: what the page holds, and that no text of a run becomes part of its structure."""

import fcntl
import json
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import yaml

from agrpo.errors import AgrpoError, ConfigError
from agrpo.lifecycle import Life
from agrpo.report.explain import explain
from agrpo.report.page import differences, page, report
from agrpo.report.plots import Curve, chart, nice_ticks
from agrpo.report.run_files import read_runs, runs_below
from agrpo.report.timeline import kind_of, lanes_of, last_steps, timeline
from tests.test_view import run as recorded_run  # noqa: F401

EVIL = "</pre></td><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><b id=evil>"
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def settings(folder, **rollout):
    return {
        "run": {"output_dir": str(folder), "devices": None, "num_processes": 1},
        "rollout": {"dump_to_file": False, "group_size": 8, **rollout},
        "model": {"path": EVIL},
        "optimizer": {"learning_rate": 1e-3},
        "scorer": {"reward_range": [0, 1]},
    }


def write_run(folder, reward=0.5, **changed):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({**settings(folder), **changed}))
    (folder / "versions.json").write_text(json.dumps({"overrides": ["+recipe=quickstart", f"model.path={EVIL}"]}))
    (folder / "summary.json").write_text(json.dumps({"exit_reason": f"finished{EVIL}"}))
    record = {
        "reward": reward, f"rewards/{EVIL}/mean": 1.0, "rewards/other/mean": 0.5, "perf/step_s": 2.0, "perf/rollout_wait_s": 1.0,
        "frac_reward_zero_std": 0.1, "eval/heldout/reward": reward, "loss": None,
    }  # fmt: skip
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": i + 1, **record}) + "\n" for i in range(12))
        file.write('{"step": 13, "half a li')
    line = {
        "group": 0, "version": 1, "prompt": [{"role": EVIL, "content": f"What? {EVIL}"}], "rewards": {EVIL: 1.0},
        "completion": [{"role": "assistant", "content": f"{EVIL}\x00\x1b[31m" + "x" * 9000}], "advantage": 1.0, "dropped": None,
    }  # fmt: skip
    (folder / "completions.jsonl").write_text(json.dumps(line) + "\n")
    life = Life(folder, "trainer0")
    for what, start in (("starting", 0), ("waiting for samples", 10), ("training", 12), (EVIL, 15)):
        life.span(what, start, start + 2)
    Life(folder, "rollout").span("group", 11.0, 14.0, group=EVIL, played=13.0)
    return folder


class Structure(HTMLParser):
    """The tags of a page with their attributes, and its texts."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def assert_harmless(text):
    tags = Structure(text).tags
    assert {t for t, _ in tags} <= {
        "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "div", "table", "tr", "th", "td", "small", "b",
        "i", "span", "code", "pre", "details", "summary", "figure", "figcaption", "svg", "line", "text", "polyline", "circle", "rect",
    }  # fmt: skip
    for tag, attributes in tags:
        assert not any(name.startswith("on") or name in ("src", "href", "id") for name in attributes), (tag, attributes)
    assert "http://" not in text and "https://" not in text and "url(" not in text


def test_no_text_of_a_run_becomes_structure(tmp_path):
    text = page(read_runs([write_run(tmp_path / "run")]))
    assert_harmless(text)
    assert EVIL in "".join(Structure(text).texts) and "\x1b" not in text and "\x00" not in text
    assert "default-src 'none'" in text
    assert_harmless(page(read_runs([tmp_path / "run", write_run(tmp_path / "other")])))


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")
def test_nothing_of_it_runs_in_a_real_browser(tmp_path):
    page_file = report([write_run(tmp_path / "run")], None)
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    result = subprocess.run([*command, "--dump-dom", page_file.as_uri()], capture_output=True, text=True, timeout=120)
    assert "<title>run</title>" in result.stdout and 'id="evil"' not in result.stdout
    # The same browser does run it where it stands unescaped, so the line above says something.
    (tmp_path / "bad.html").write_text(f"<title>run</title><body>{EVIL}")
    result = subprocess.run(
        [*command, "--dump-dom", (tmp_path / "bad.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "<title>owned</title>" in result.stdout


def test_one_run_shows_verdicts_curves_timeline_rollouts_and_configuration(tmp_path):
    text = report([write_run(tmp_path / "run")], None).read_text()
    assert (tmp_path / "run" / "report.html").exists()
    for words in (
        "generation-bound",
        "training waits 1.00 s of each 2.00 s step (50 %)",
        "evaluation heldout",
        "rewards/",
        "group ",
    ):
        assert words in text, words
    assert text.count("<figure>") >= 4 and 'class="timeline"' in text and "waiting for samples" in text


def test_tokens_show_by_how_much_both_sides_disagree(recorded_run):  # noqa: F811
    (recorded_run / "metrics.jsonl").write_text("")
    text = page(read_runs([recorded_run]))
    assert 'title="server -0.2500, trainer -0.7500, gap -0.5000"' in text and "rgba(209,73,91,0.50)" in text
    assert "No step has been logged" in text


def test_runs_of_a_sweep_are_compared_by_what_differs(tmp_path):
    for number, rate in enumerate((1e-3, 1e-4, 1e-5)):
        write_run(tmp_path / "sweep" / str(number), reward=rate, optimizer={"learning_rate": rate})
    (tmp_path / "sweep" / "multirun.yaml").write_text("hydra: {}")
    runs = read_runs([tmp_path / "sweep"])
    assert [r.name for r in runs] == ["0", "1", "2"]
    assert differences([r.settings for r in runs]) == ["optimizer.learning_rate"]
    text = page(runs)
    assert "3 runs" in text and "<th>optimizer.learning_rate</th>" in text and text.count("<polyline") >= 6


def test_equal_names_are_told_apart_by_their_parents(tmp_path):
    runs = read_runs([write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")])
    assert [r.name for r in runs] == ["a/run", "b/run"]


def test_a_folder_without_runs_and_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="holds no run and no folder of runs"):
        report([tmp_path], None)
    with pytest.raises(AgrpoError, match="name a file in a folder that exists"):
        report([write_run(tmp_path / "run")], tmp_path / "none" / "page.html")


def test_ticks_are_round_numbers_around_the_data():
    assert nice_ticks(0.13, 0.87) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert nice_ticks(0, 100) == [0, 25, 50, 75, 100]
    low, *_, high = nice_ticks(3.0, 3.0)
    assert low < 3.0 < high


def test_a_curve_spans_its_chart_and_many_points_are_averaged():
    drawn = chart("t", [Curve("c", [(0, 0.0), (10, 1.0)])])
    assert 'points="52.0,176.0 448.0,10.0"' in drawn  # margins: 52 left, 12 right, 10 above, 24 below, of 460 x 200
    assert chart("t", [Curve("c", [(i, 1.0) for i in range(10_000)])]).count("<circle") <= 240
    assert chart("t", [Curve("c", [(0, float("nan"))])]) == ""


def test_spans_of_one_lane_never_overlap():
    spans = [{"start": s, "end": e} for s, e in ((0, 4), (1, 2), (2, 3), (3, 6), (5, 7))]
    assert lanes_of(spans) == [0, 1, 1, 1, 0]


def test_the_last_steps_and_the_kinds_of_phases():
    steps = [{"what": "training", "start": 2.0 * i, "end": 2.0 * i + 1} for i in range(20)]
    assert last_steps({"rollout": [], "trainer0": steps}) == (24.0, 39.0)
    assert last_steps({"rollout": []}) is None and timeline({}) == ""
    kinds = [
        kind_of(w)[0] for w in ("waiting for samples", "sending the weights", "training", "loading the model", "paused")
    ]
    assert kinds == ["waiting", "weights", "training", "starting", "waiting"]


PLAUSIBLE = {
    "a step without its time": ("metrics.jsonl", '{"step": 13, "perf/step_s": null, "num_tokens": null, "eval/heldout/step": null, "eval/heldout/reward": 0.5}\n'),
    "a record without a step": ("metrics.jsonl", '{"step": null, "perf/step_s": 2.0}\n'),
    "half a summary": ("summary.json", '{"exit_rea'),
    "a summary that is none": ("summary.json", "[]"),
    "half the versions": ("versions.json", '{"overrides": ["a'),
    "a phase without an end": ("timeline/trainer0.jsonl", '{"what": "training", "start": 3.0}\n'),
    "an empty section": ("config.yaml", "logger: null\nmodel: null\nrollout: null\n"),
}  # fmt: skip


@pytest.mark.parametrize("name, text", PLAUSIBLE.values(), ids=PLAUSIBLE)
def test_what_a_killed_run_may_leave_behind_is_no_failure_of_the_page(tmp_path, name, text):
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(text)
    assert "<h2>Rollouts</h2>" in page(read_runs([folder]))
    told = []
    explain(folder, False, told.append)
    assert "step" in told[0]


@pytest.mark.parametrize("text", ["", "a: [1", "- 1\n", "\x00"])
def test_a_run_that_cannot_be_read_is_left_out_of_a_comparison_and_refused_alone(tmp_path, text):
    runs = [write_run(tmp_path / "sweep" / str(number)) for number in range(3)]
    (runs[1] / "config.yaml").write_text(text)
    drawn = page(read_runs([tmp_path / "sweep"]))
    assert "2 runs" in drawn and "<p>1 is left out: " in drawn
    for read in (lambda: read_runs([runs[1]]), lambda: explain(runs[1], False, print)):
        with pytest.raises(ConfigError, match="give the folder of another run") as refused:
            read()
        assert len(str(refused.value).splitlines()) == 1


def test_hidden_folders_hold_no_runs(tmp_path):
    write_run(tmp_path / ".here" / "runs" / "a")
    write_run(tmp_path / ".here" / "runs" / "a" / ".doctor" / "run")
    write_run(tmp_path / ".here" / "runs" / ".doctor")
    assert runs_below(tmp_path / ".here" / "runs") == [tmp_path / ".here" / "runs" / "a"]


def test_a_failed_run_says_why_and_an_active_one_that_it_runs(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "summary.json").unlink()
    (folder / "state").mkdir(exist_ok=True)
    (folder / "state" / "server.exit.json").write_text(
        json.dumps({"process": "server", "code": 0, "reason": "finished"})
    )
    assert "<td>ended without a summary</td>" in page(read_runs([folder]))
    (folder / "state" / "trainer0.exit.json").write_text(
        json.dumps({"process": "trainer0", "code": 4, "reason": f"the disk is full {EVIL}"})
    )
    drawn = page(read_runs([folder]))
    assert "<td>failed</td>" in drawn and "<pre>trainer0: the disk is full" in drawn
    (folder / "failure.txt").write_text(f"trainer0 ended with exit code 4\n  last line {EVIL}\n")
    drawn = page(read_runs([folder]))
    assert "<pre>trainer0 ended with exit code 4" in drawn and "the disk is full" not in drawn
    assert_harmless(drawn)
    told = []
    explain(folder, False, told.append)
    assert told[0].endswith("failed") and told[1].startswith("trainer0 ended with exit code 4")
    (folder / "summary.json").write_text('{"exit_reason": "interrupted"}')  # of the run before, which is continued
    with (folder / "state" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        drawn = page(read_runs([folder]))
        assert "<td>running</td>" in drawn and "exit code 4" not in drawn
        assert "<td>running</td>" in page(read_runs([folder, write_run(tmp_path / "other")]))


def test_a_comparison_draws_waits_and_evaluations_of_each_run(tmp_path):
    runs = read_runs([write_run(tmp_path / "a", reward=0.25), write_run(tmp_path / "b", reward=0.75)])
    drawn = page(runs)
    for title in ("Training waits: perf/rollout_wait_s", "Evaluation: eval/heldout/reward"):
        figure = drawn[drawn.index(f"<figcaption>{title}") :].split("</figure>")[0]
        assert figure.count("<polyline") == 2 and "</i>a</span>" in figure and "</i>b</span>" in figure
    assert "Evaluation: " not in page(runs[:1])


def test_an_evaluation_has_its_interval_as_the_console_writes_it_and_one_result_is_one(tmp_path):
    folder = write_run(tmp_path / "run")
    figures = [{"reward": 0.25, "reward_ci95": 0.04, "version": 1}, {"reward": 0.75, "reward_ci95": 0.03, "version": 9}]
    for count, text in ((1, "0.250 +-0.040 (version 1)"), (2, "0.250 +-0.040 (version 1) -&gt; 0.750 +-0.030 (version 9)")):
        lines = [{"step": 8 * i, **{f"eval/heldout/{k}": v for k, v in f.items()}} for i, f in enumerate(figures[:count])]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        assert f"<td>{text}</td>" in page(read_runs([folder]))


def test_keys_that_have_no_column_in_a_comparison_are_named(tmp_path):
    runs = [write_run(tmp_path / name, data={f"key{i}": name for i in range(8)}) for name in ("a", "b")]
    drawn = page(read_runs(runs))
    assert "<th>data.key5</th>" in drawn and "<th>data.key6</th>" not in drawn
    assert "<p>2 more keys differ: data.key6, data.key7.</p>" in drawn


def test_an_evaluation_that_was_made_again_counts_once(tmp_path):
    folder = write_run(tmp_path / "run")
    lines = [(5, 5, 0.2), (6, 5, 0.4), (9, 8, 0.6)]  # (step of the record, of the weights, reward)
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": s, "eval/heldout/step": of, "eval/heldout/reward": r}) + "\n" for s, of, r in lines)
    )
    assert "0.400 -&gt; 0.600" in page(read_runs([folder]))
