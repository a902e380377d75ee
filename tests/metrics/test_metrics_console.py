"""What the console shows, as text of a fixed width."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import time

import pytest
from rich.console import Console as RichConsole

from agrpo.metrics.chart import curve
from agrpo.metrics.console import Console, clock, evaluation_line, step_line
from agrpo.metrics.live import MOST_POINTS, Glance, short_number
from agrpo.metrics.output import HELD_UP_S, Unfailing
from agrpo.metrics.picture import draw
from agrpo.metrics.summary import summarize
from agrpo.metrics.tail import Tail

RECORD = {
    "step": 12,
    "reward": 0.4149,
    "loss": -0.0131,
    "sample/staleness_mean": 1.0,
    "perf/wall_clock_forwarded_tokens_per_s": 4812.0,
    "perf/rollout_wait_s": 0.84,
    "perf/step_s": 1.2,
    "diag/bottleneck": "generation-bound",
}


ROLLOUT = {
    "prompt": [{"role": "user", "content": "What is [b]6 * 7[/b]?"}],
    "completion": [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calculate", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "42"},
    ],
    "rewards": {"correct": 1.0, "short": None},
    "advantage": 0.5,
    "dropped": None,
}
TOKENS = {
    "generated": 12321,
    "restored": 0,
    "trained": 9100,
    "discarded": {"zero_std": 1900, "stale": 300, "timeout": 150, "unused": 50},
    "untrained": 500,
    "in_flight": 321,
}


def make_console(tmp_path, terminal: bool, **settings):
    file = io.StringIO()
    output = RichConsole(file=file, width=80, force_terminal=terminal, highlight=False, color_system=None)
    return Console(tmp_path, output=output, **settings), file


def rendered(console) -> str:
    file = io.StringIO()
    RichConsole(file=file, width=80, color_system=None).print(console.render())
    return file.getvalue()


def make_records(num: int) -> list[dict]:
    start = {"step": 0, "eval/heldout/reward": 0.52, "eval/heldout/version": 0.0}
    steps = [{**RECORD, "step": i, "reward": 0.5 + 0.4 * i / num} for i in range(1, num + 1)]
    steps[-1] = {**steps[-1], "eval/heldout/reward": 0.94, "eval/heldout/version": float(num)}
    return [start, *steps]


def test_step_line_reads_as_promised():
    assert step_line(RECORD, 60) == (
        "step 12/60  reward 0.41  loss -0.013  staleness 1.0  tokens/s 4.8k  wait 0.8s  step 1.2s  generation-bound"
    )
    assert step_line({"step": 3, "reward": None, "perf/step_s": 2.0}) == "step 3  step 2.0s"
    assert step_line({"step": 0, "eval/heldout/reward": 0.52}, 60) == "step 0/60  heldout 0.52"


def test_numbers_are_short():
    assert [short_number(v) for v in (0, 37.4, 999, 4812, 123_456, 1_234_567)] == [
        "0",
        "37",
        "999",
        "4.8k",
        "123k",
        "1.2M",
    ]
    assert [clock(s) for s in (0, 59.9, 75, 3675)] == ["0:00", "0:59", "1:15", "1:01:15"]


def test_piped_output_is_one_plain_line_per_phase_and_step(tmp_path):
    console, file = make_console(tmp_path, terminal=False, max_steps=60)
    with console:
        for text in ("loading model", "loading model"):
            console.phase("server", text)
        for text in ("waiting for weights", "generating", "waiting for weights", "generating"):
            console.phase("rollout", text)
        console.step(RECORD)
        console.phase("rollout", "playing")
        console.note("server restarted [1/3]")
        console.note("the reward accuracy raised ValueError: \u2264 0")
    run, *lines = file.getvalue().splitlines()
    assert run == f"run {tmp_path}, 60 steps"
    assert [line.split("] ", 1)[1] for line in lines[:3]] == [
        "server: loading model", "rollout: waiting for weights", "rollout: generating",
    ]  # fmt: skip
    assert lines[3] == step_line(RECORD, 60) and lines[4] == "server restarted [1/3]" and len(lines) == 6
    assert "\x1b" not in file.getvalue()


def test_without_the_console_sink_phases_and_verdicts_are_left(tmp_path):
    console, file = make_console(tmp_path, terminal=False, shows_steps=False)
    with console:
        console.phase("server", "ready")
        console.step(RECORD)
        console.fail(["collapse: the entropy is gone"])
    assert file.getvalue().splitlines()[2:] == ["", "collapse: the entropy is gone", ""]


def test_quiet_leaves_the_start_warnings_and_the_end(tmp_path):
    console, file = make_console(tmp_path, terminal=True, max_steps=7, quiet=True)
    with console:
        console.phase("server", "starting")
        console.note("warning: the context is short")
        for record in make_records(7):
            console.step(record)
        console.completions([ROLLOUT])
        console.event("server", "ended with code 1 after 12 s, restart 1 of 3")
        console.finish({"tokens": TOKENS}, {"model": "/runs/a/model"})
    run, warning, event, evaluation, *tokens, _, model = file.getvalue().splitlines()
    assert (run, warning, model) == (f"run {tmp_path}, 7 steps", "warning: the context is short", "model  /runs/a/model")
    assert event.endswith("restart 1 of 3") and evaluation.startswith("heldout  0.520")
    assert " ".join(line.strip() for line in tokens) == (
        "tokens  12.3k generated = 9.1k trained + 2.4k discarded (zero_std 1.9k, stale 300, timeout 150) + 500 untrained + "
        "321 in flight"
    )


def test_a_disk_that_takes_no_more_ends_the_console_and_nothing_else(tmp_path, capsys):
    (tmp_path / "curve.txt").mkdir()  # where the curve would be written
    for terminal in (False, True):
        with open("/dev/full", "w") as full:
            console = Console(tmp_path, output=RichConsole(file=full, width=80, force_terminal=terminal))
            with console:
                for record in make_records(7):
                    console.step(record)
                console.completions([ROLLOUT])
                console.finish({"tokens": TOKENS}, {"model": "/runs/a/model"})
        said = "warning: nothing more is written to the console: No space left on device; the run goes on\n"
        assert capsys.readouterr().err == said
    console, file = make_console(tmp_path, terminal=False)
    console.finish({}, {"model": "/runs/a/model"}, make_records(7))
    assert f"{tmp_path}/curve.txt was not written: Is a directory" in file.getvalue()
    assert file.getvalue().splitlines()[-1] == "model  /runs/a/model"


def test_rollouts_follow_their_record_as_a_table_or_as_lines(tmp_path):
    console, file = make_console(tmp_path, terminal=False)
    console.completions([ROLLOUT, {**ROLLOUT, "advantage": None}, {**ROLLOUT, "dropped": "zero_std"}])
    first, second, third = file.getvalue().splitlines()
    call = '"assistant: calculate({\\"x\\": 1}) tool: 42"'
    assert first == f'  "What is [b]6 * 7[/b]?" -> {call}  correct 1 short none  advantage +0.500'
    assert second.endswith("advantage in the step") and third.endswith("advantage zero_std")
    console, file = make_console(tmp_path, terminal=True)
    console.completions([{**ROLLOUT, "completion": [{"role": "assistant", "content": "x" * 5000}]}])
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 40 and "[b]6 * 7[/b]?" in file.getvalue()


def test_rollouts_are_read_as_they_come_and_no_more_than_asked_for(tmp_path):
    path = tmp_path / "completions.jsonl"
    path.write_text(json.dumps({"group": 0}) + "\n")
    tail, everything = Tail(path), Tail(path)
    with path.open("a") as file:
        file.write("".join(json.dumps({"group": i}) + "\n" for i in (1, 2, 3)) + '{"gro')
    assert [row["group"] for row in tail.new_rows(2)] == [2, 3]
    assert [row["group"] for row in everything.new_rows()] == [1, 2, 3]
    assert tail.new_rows() == []


def test_live_view_shows_phases_and_then_the_steps_in_80_columns(tmp_path):
    console, _ = make_console(tmp_path, terminal=True, max_steps=60)
    console.phase("server", "loading model")
    console.phase("trainer0", "sending the first weights")
    assert [line.split()[0] for line in rendered(console).splitlines()] == ["starting", "server", "trainer0"]
    for record in [*make_records(12), {"step": 12, "eval/heldout/reward": 0.94, "eval/heldout/version": 12.0}]:
        console.step(record)
    text = rendered(console)
    assert max(map(len, text.splitlines())) <= 80
    assert "step 12/60 [#####-------------------]" in text and "left 0:57" in text  # 48 steps of 1.2 s
    assert "generation-bound: training waits for samples" in text
    header, *rows = [line for line in text.splitlines() if "bottleneck" in line or line.endswith("generation-bound")]
    assert header.split() == ["step", "reward", "loss", "staleness", "tokens/s", "wait", "s", "step", "s", "bottleneck"]
    rows = [row.strip() for row in rows]
    assert [row.split()[0] for row in rows] == [str(i) for i in range(8, 13)]
    assert rows[-1].split() == ["12", "0.90", "-0.013", "1.0", "4.8k", "0.8", "1.2", "generation-bound"]
    assert "heldout  0.520 (version 0) -> 0.940 (version 12)" in text


def test_live_view_ends_without_a_trace_of_control_characters_in_the_records(tmp_path):
    console, file = make_console(tmp_path, terminal=True, max_steps=12)
    with console:
        for record in make_records(12):
            console.step(record)
        console.finish(
            summarize(make_records(12), "max_steps"), {"model": "/runs/a/model", "metrics": "/runs/a/metrics.jsonl"}
        )
    text = file.getvalue()
    assert text.rstrip().splitlines()[-2:] == ["model    /runs/a/model", "metrics  /runs/a/metrics.jsonl"]
    saved = (tmp_path / "curve.txt").read_text()
    assert saved.isascii() and saved.count("O") == 2


@pytest.mark.parametrize("quiet", [False, True])
def test_a_quiet_console_says_what_happened_and_not_how_far_it_is(tmp_path, quiet):
    console, file = make_console(tmp_path, terminal=False, quiet=quiet)
    console.progress("server", "loading model (5 s)")
    console.event("server", "restarting (1 of 5)")
    text = file.getvalue()
    assert "restarting (1 of 5)" in text and ("loading model" in text) == (not quiet)


def test_an_evaluation_stands_where_its_weights_were_made_with_its_interval(tmp_path):
    console, _ = make_console(tmp_path, terminal=False)
    for step, made_at, reward in ((10, 0, 0.25), (20, 15, 0.75)):
        figures = {"reward": reward, "version": made_at + 1, "step": made_at, "reward_ci95": 0.04}
        console.step({"step": step, **{f"eval/heldout/{k}": v for k, v in figures.items()}})
    assert console._history.marks == [(0, 0.25), (15, 0.75)]
    line = evaluation_line("heldout", console._history.evaluations["heldout"])
    assert line == "heldout  0.250 +-0.040 (version 1) -> 0.750 +-0.040 (version 16)"


def test_end_of_a_piped_run_is_ascii(tmp_path):
    console, file = make_console(tmp_path, terminal=False)
    console.finish(summarize(make_records(7), "max_steps"), {"model": "/runs/a/model"}, make_records(7))
    text = file.getvalue()
    assert text.isascii() and max(map(len, text.splitlines())) <= 80
    assert "reward by step   (O = heldout)" in text and "heldout  0.520 (version 0) -> 0.940 (version 7)" in text


def test_sentences_break_between_words_on_a_terminal_and_paths_nowhere(tmp_path):
    verdict, path = "few-signals: " + "of the groups have equal rewards " * 5, "/runs/" + "folder/" * 20
    ends = []
    for terminal in (True, False):
        console, file = make_console(tmp_path, terminal=terminal)
        console.finish({"tokens": TOKENS}, {"model": path}, verdicts=[verdict])
        ends.append(file.getvalue().splitlines())
        assert ends[-1][-1] == f"model  {path}"
    told = [line for line in ends[0] if "groups" in line or "rewards" in line]
    assert len(told) > 1 and max(map(len, told)) <= 80 and " ".join(" ".join(told).split()) == verdict.strip()
    assert [line.rstrip() for line in ends[1] if "groups" in line] == [verdict.strip()]


def test_run_that_failed_before_its_first_step_still_lists_its_paths(tmp_path):
    console, file = make_console(tmp_path, terminal=False)
    console.finish(summarize([], "error"), {"logs": "/runs/a/logs"})
    assert file.getvalue().split() == ["logs", "/runs/a/logs"]


def test_the_live_view_says_what_each_side_does_and_fits_a_small_terminal(tmp_path):
    console, _ = make_console(tmp_path, terminal=True, max_steps=60)
    console.output.height = 24
    sides = {
        "rollout/generated_tokens_per_s": 5120.0,
        "rollout/concurrency": 41.6,
        "rollout/concurrency_cap": 64.0,
        "rollout/queue_size": 12.4,
        "sample/staleness_max": 2.0,
    }
    for record in make_records(30):
        console.step({**record, **sides})
    console.phase("trainer0", "saving a checkpoint")
    console.phase("stop", "finishing the step and saving; press Ctrl-C again to stop at once without saving")
    lines = rendered(console).rstrip().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    shown = [" ".join(line.split()) for line in lines]
    assert "generation 5.1k tokens/s 42 of 64 rollouts in flight" in shown
    assert "training 4.8k tokens/s step 1.2 s, waits 0.8 s (70% of the time)" in shown
    assert "queue 12 samples staleness mean 1.0, largest 2 versions" in shown
    assert lines[-2].startswith("trainer0: saving a checkpoint") and lines[-1].startswith("stop: finishing")


def test_a_long_run_is_kept_in_bounded_space():
    history = Glance(("reward",), 5)
    for step in range(1, 10_001):
        history.add({"step": step, "reward": step / 10_000, "perf/step_s": 2.0})
    assert len(history.rows) == 5 and MOST_POINTS / 2 <= len(history.rewards) <= MOST_POINTS
    assert history.rewards[0] == (1, 1e-4) and history.rewards[-1][0] > 9_990
    assert history.time_left_s(10_100) == 200 and history.time_left_s(None) is None


def test_without_a_number_of_steps_epochs_say_how_much_is_left(tmp_path):
    console, file = make_console(tmp_path, terminal=True, num_epochs=3.0)
    with console:
        console.step({"step": 4, "perf/step_s": 2.0})
        assert rendered(console).splitlines()[0].split("   ")[0] == "step 4"
        # 10 steps for half an epoch: 50 more for the other 2.5, of 2 s each.
        console.step({"step": 10, "epoch": 0.5, "perf/step_s": 2.0})
        assert "step 10  epoch 0.50/3 [####--------------------]" in rendered(console) and "left 1:40" in rendered(console)
        console.step({"step": 61, "epoch": 3.02, "perf/step_s": 2.0})
        assert "[########################]" in rendered(console) and "left 0:00" in rendered(console)
    assert file.getvalue().startswith(f"run {tmp_path}, 3 epochs")
    assert Console(tmp_path, max_steps=60, num_epochs=3.0)._num_epochs is None


def test_curve_puts_points_where_they_belong():
    # 11 columns and 5 rows: column i lies at row 4 - 0.4 i, rounded.
    assert curve([(0, 0.0), (10, 1.0)], [(0, 1.0)], width=17, height=6).splitlines() == [
        "1.00 |O        **",
        "     |       **",
        "0.50 |    ***",
        "     |  **",
        "0.00 |**",
        "      0        10",
    ]


@pytest.mark.parametrize("points", [[], [(1, float("nan"))]])
def test_curve_of_nothing_is_empty(points):
    assert curve(points) == ""


def test_curve_of_equal_values_and_of_many_points_keeps_its_size():
    for points in ([(1, 0.5)], [(i, 0.5) for i in range(3)], [(i, i % 7) for i in range(5000)]):
        for ascii_only in (True, False):
            lines = curve(points, width=61, height=9, ascii_only=ascii_only).splitlines()
            assert len(lines) == 9 and max(map(len, lines)) <= 61


def test_a_picture_of_a_run_is_made_from_its_records(tmp_path):
    (tmp_path / "config.yaml").write_text("run: {max_steps: 60}\n")
    with (tmp_path / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in make_records(30))
    draw(tmp_path, tmp_path / "console.svg", 12)
    text = (tmp_path / "console.svg").read_text().replace("&#160;", " ")
    assert text.startswith("<svg") and "step 12/60 [#####" in text and "elapsed 0:14" in text


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_what_nobody_reads_is_left_out_and_what_follows_is_shown(kind):
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    with open(writer, "w") as file:
        output, began = Unfailing(file, "the console"), time.monotonic()
        for number in range(1500):
            output.write(f"{number:098d}\n")
            output.flush()
        assert time.monotonic() - began < 10 * HELD_UP_S
        os.set_blocking(reader, False)
        read(reader)
        output.write("there again\n")
        assert re.search(r"\(\d+ writes were left out: nobody read them\)\r?\nthere again\r?\n$", read(reader))
    os.close(reader)


def read(reader):
    text = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(reader, 4096):
            text += part
    return text.decode()
