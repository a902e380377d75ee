"""The supervisor with real processes that follow a script: normal end, every kind of death, signals, no orphan."""

import contextlib
import errno
import fcntl
import json
import os
import pty
import re
import resource
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from agrpo.launch import dump, run_folder
from agrpo.launch.diagnosis import ending
from agrpo.launch.processes import Child, Launch, free_ports, kill
from agrpo.launch.server import Server, last_words
from agrpo.launch.watchdog import Watchdog
from agrpo.metrics.console import Console
from agrpo.metrics.findings import closing
from agrpo.metrics.tail import Tail
from agrpo.rollout.__main__ import LOADING
from agrpo.sections import Rollout as RolloutSettings
from agrpo.sections import Run as RunSettings

SUPERVISE = str(Path(__file__).with_name("supervise_scripted.py"))
ALL = ("server", "trainer0", "trainer1", "rollout")
LIMIT_S = 15.0


class Run:
    """A supervisor in a process of its own, and the processes that belong to its run folder."""

    def __init__(self, run_dir: Path, scripts: tuple[str, ...], settings: tuple[str, ...] = (), program=(SUPERVISE,), **options):
        self.run_dir = run_dir
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        self.popen = subprocess.Popen(
            [sys.executable, *program, str(run_dir), *scripts, *settings],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}, text=True, env=environment,
        )  # fmt: skip

    def await_phase(self, name: str, phase: str) -> int:
        """Wait until the process shows this phase; its pid."""
        path = self.run_dir / "state" / f"{name}.alive.json"
        for _ in range(600):
            if path.exists() and (beat := json.loads(path.read_text()))["phase"] == phase:
                return beat["pid"]
            assert self.popen.poll() is None, self.popen.communicate()
            time.sleep(0.05)
        raise AssertionError(f"{name} never reached {phase}")

    def await_line(self, pattern: str) -> None:
        """Read on until a line of the console matches; steps are printed all the time, so no line is long in coming."""
        deadline = time.monotonic() + 60
        for line in self.popen.stdout:
            if re.search(pattern, line):
                return
            assert time.monotonic() < deadline, f"no line matched {pattern!r} for a minute"
        raise AssertionError(f"the run ended without {pattern!r}: {self.popen.stderr.read()}")

    def await_all(self) -> dict[str, int]:
        phases = {"server": "serving", "trainer0": "training", "trainer1": "training", "rollout": "generating"}
        return {name: self.await_phase(name, phase) for name, phase in phases.items()}

    def end(self, startup_s: float = 30.0) -> tuple[int, str, str]:
        """Exit code and output; afterwards no process of the run may be left. `startup_s` is for runs not awaited."""
        out, err = self.popen.communicate(timeout=startup_s + LIMIT_S)
        assert self.left() == []
        return self.popen.returncode, out, err

    def left(self) -> list[str]:
        """Live processes of this run: the run folder is in every command line, and forks inherit it."""
        found = []
        for process in psutil.process_iter():
            try:
                if str(self.run_dir) in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found


GOOD = ("healthy", "train", "train", "roll_out")
ENDLESS = ("healthy", "train_on", "train_on", "roll_out")


def test_a_run_that_ends_well(tmp_path):
    code, out, err = Run(tmp_path / "run", GOOD).end()
    assert code == 0, err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 10
    for name in ALL:
        assert (tmp_path / "run" / "logs" / f"{name}.log").exists()
    assert "healthy after" in out and "step 10" in out
    versions = json.loads((tmp_path / "run" / "versions.json").read_text())
    assert versions["python"] == sys.version.split()[0] and versions["torch"]
    assert oct((tmp_path / "run" / "state" / "runtime.json").stat().st_mode)[-3:] == "600"


@pytest.mark.parametrize("victim", ALL)
def test_kill_of_one_process_ends_the_run_and_names_it(tmp_path, victim):
    run = Run(tmp_path / "run", ENDLESS)
    os.kill(run.await_all()[victim], signal.SIGKILL)
    code, _, err = run.end(startup_s=0)
    assert f"{victim} was killed by SIGKILL" in err
    assert code == (4 if victim == "server" else 1)
    for name in ALL:
        assert name in err  # the last sign of life of each


def test_a_server_is_started_again_until_it_died_too_often(tmp_path):
    """Also what it started is gone before its successor comes: `end` looks for it, and both want the same port."""
    run = Run(tmp_path / "run", ("labelled", *ENDLESS[1:]), ("server.max_restarts=2",))
    run.await_all()
    for count in (1, 2):
        os.kill(run.await_phase("server", "serving"), signal.SIGKILL)
        run.await_line(rf"server: was killed by SIGKILL after \d+ s, restarting \({count} of 2\)")
        run.await_line("Loading shards")  # of its log
        run.await_line("healthy again")
        run.await_line("has the weights of version 3")
    os.kill(run.await_phase("server", "serving"), signal.SIGKILL)
    code, _, err = run.end(startup_s=0)
    assert code == 4
    assert "was killed by SIGKILL; it was restarted 2 times within an hour (server.max_restarts=2)" in err
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_a_server_that_lives_on_without_its_engine_is_ended_and_started_again(tmp_path, capsys):
    (port,) = free_ports(1)
    script = str(Path(__file__).with_name("scripted_process.py"))
    argv = [sys.executable, script, "server", str(tmp_path), "labelled", str(port)]
    console = Console(tmp_path, max_steps=1, live=False, shows_steps=False)
    server = Server(
        Launch("server", argv, {}), (f"http://127.0.0.1:{port}",), tmp_path,
        timeout_s=60.0, max_restarts=1, console=console, refusing_s=1.0,
    )  # fmt: skip
    server.start()
    try:
        server.await_healthy(lambda: None, lambda: [])
        first = server.child
        (tmp_path / "sick").touch()
        deadline = time.monotonic() + 60
        while server.child is first:
            assert time.monotonic() < deadline
            server.look(lambda: [])
            time.sleep(0.05)
        assert first.code == -signal.SIGKILL
        (tmp_path / "sick").unlink()
        while "healthy again" not in capsys.readouterr().out and time.monotonic() < deadline:
            server.look(lambda: [])
            time.sleep(0.2)
        assert time.monotonic() < deadline
    finally:
        kill([server.child])


def test_a_server_whose_answers_name_no_weights_is_not_started_again(tmp_path):
    run = Run(tmp_path / "run", ENDLESS)
    os.kill(run.await_all()["server"], signal.SIGKILL)
    code, out, err = run.end(startup_s=0)
    assert code == 4 and "server was killed by SIGKILL." in err
    assert "the server is not restarted if it dies" in out and "restarting" not in out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("(EngineCore pid=7) INFO 11-30 06:39:27 [loader.py:7] Loading shards", "Loading shards"),
        ("2026-11-30 06:39:27,123 agrpo.serve: serving m", "agrpo.serve: serving m"),
        ("ValueError: no room\n\n  ^^^^\n", "ValueError: no room"),
    ],
)
def test_the_last_words_of_a_log(tmp_path, line, words):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "server.log").write_text(line + "\n")
    assert last_words(Child("server", None, tmp_path)) == words


def test_trainers_save_when_another_process_dies(tmp_path):
    run = Run(tmp_path / "run", ENDLESS)
    os.kill(run.await_all()["rollout"], signal.SIGKILL)
    _, out, err = run.end()
    verdicts = closing(tmp_path / "run")
    assert "90 % of the groups have equal rewards" in verdicts[0] and "\n".join(["", *verdicts, ""]) in out
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_kill_of_the_supervisor_leaves_no_process(tmp_path):
    run = Run(tmp_path / "run", ENDLESS)
    run.await_all()
    run.popen.kill()
    run.popen.communicate(timeout=5)
    deadline = time.monotonic() + LIMIT_S
    while run.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert run.left() == []


def test_an_error_of_user_code_keeps_its_exit_code_and_text(tmp_path):
    folder = tmp_path / "run"
    code, _, err = Run(folder, ("healthy", "train_on", "train_on", "contract")).end()
    assert code == 5
    assert "rollout ended with exit code 5: reward pkg.mod.length returned 7 values for 8 completions" in err
    assert (folder / "failure.txt").read_text() == err


def test_the_reason_is_that_of_the_process_whose_peer_noticed_first(tmp_path):
    code, _, err = Run(tmp_path / "run", ("healthy", "lose_peer", "train_on", "close_first")).end()
    assert code == 6 and "rollout ended with exit code 6: rollout.progress_timeout=6: 4 groups are being scored" in err


def test_a_hanging_trainer_is_killed(tmp_path):
    run = Run(tmp_path / "run", ("healthy", "train_on", "hang", "roll_out"))
    run.await_phase("trainer1", "stuck in a collective")
    run.await_phase("rollout", "generating")
    os.kill(run.await_phase("trainer0", "training"), signal.SIGKILL)
    code, _, err = run.end(startup_s=0)
    assert code == 1 and "trainer0 was killed by SIGKILL" in err and "'stuck in a collective'" in err


def test_silence_beyond_the_limit_is_a_stall_that_names_the_key(tmp_path):
    run = Run(tmp_path / "run", ("healthy", "train_on", "hang", "roll_out"), ("run.collective_timeout=2",))
    code, _, err = run.end()
    assert code == 6
    assert "trainer1 gave no sign of life" in err and "run.collective_timeout=2" in err


def test_a_rollout_process_that_freezes_while_it_waits_for_the_trainer_is_a_stall_too(tmp_path):
    run = Run(tmp_path / "run", (*ENDLESS[:3], "freeze"), ("rollout.worker_timeout=2",))
    code, _, err = run.end()
    assert code == 6
    assert "rollout gave no sign of life" in err and "rollout.worker_timeout=2" in err


def test_two_that_wait_for_each_other_are_a_stall_with_everything_that_is_known(tmp_path):
    """Everybody beats and nobody works: no process can see it for itself."""
    scripts = ("foreign", "await_samples", "await_samples", "await_trainer")
    code, _, err = Run(tmp_path / "run", scripts, ("rollout.progress_timeout=1.5",)).end()
    assert code == 6
    assert "nothing was achieved for" in err and "rollout.progress_timeout=1.5" in err
    assert "trainer0 is 'waiting for samples'" in err and "rollout is 'waiting for the trainer'" in err
    folder = tmp_path / "run" / "stall"
    assert str(folder) in err
    for name in ("trainer0", "trainer1", "rollout"):
        assert "in wait" in (folder / f"{name}.stacks.txt").read_text()
    assert "Loading shards" in (folder / "server.log.txt").read_text()
    stacks = (folder / "server.stacks.txt").read_text()  # a container may forbid to read them
    assert any(words in stacks for words in ("serve_forever", "pip install py-spy", "ermission")), stacks
    lane = [json.loads(line) for line in (tmp_path / "run" / "timeline" / "server.jsonl").read_text().splitlines()]
    assert [span["what"] for span in lane] == ["starting", "serving"] and lane[0]["end"] == lane[1]["start"]
    assert 1.0 < lane[1]["end"] - lane[1]["start"] < 60.0
    facts = {f["name"]: f for f in json.loads((folder / "processes.json").read_text())}
    assert facts["rollout"]["sign_of_life"]["phase"] == "waiting for the trainer"
    assert all(p["num_threads"] >= 1 for f in facts.values() for p in f["processes"])


def test_what_cannot_be_kept_of_a_stall_takes_nothing_else_with_it(tmp_path):
    (tmp_path / "state" / "rollout.tasks").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    folder = dump.dump(tmp_path, [])
    assert sorted(p.name for p in folder.iterdir()) == ["metrics.jsonl", "processes.json", "supervisor.stacks.txt"]
    assert "in dump" in (folder / "supervisor.stacks.txt").read_text()


def test_a_process_that_was_stopped_is_named_with_what_lets_it_go_on(tmp_path):
    run = Run(tmp_path / "run", ENDLESS, ("run.collective_timeout=2",))
    pid = run.await_all()["trainer1"]
    os.kill(pid, signal.SIGSTOP)
    code, _, err = run.end(startup_s=0)
    assert code == 6 and "trainer1 gave no sign of life" in err
    assert f"trainer1 was stopped by a signal: kill -CONT {pid}" in err
    assert "in train" in (tmp_path / "run" / "stall" / "trainer0.stacks.txt").read_text()


def test_a_server_that_never_gets_healthy(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for left in ("summary.json", "failure.txt"):  # by a run that is continued
        (folder / left).write_text("{}")
    code, _, err = Run(folder, ("unhealthy", *GOOD[1:]), ("server.timeout=6.5",)).end()
    assert code == 4
    assert "not healthy after 6.5 s (HTTP 503)" in err and "server.timeout" in err
    assert (folder / "failure.txt").read_text() == err and not (folder / "summary.json").exists()
    assert str(folder / "stall") in err and "Loading shards" in (folder / "stall" / "server.log.txt").read_text()
    assert (folder / "stall" / "server.stacks.txt").exists()


def test_first_signal_saves_and_ends_cleanly(tmp_path):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))  # noqa: E731
    run = Run(tmp_path / "run", ENDLESS, preexec_fn=few)
    for pid in run.await_all().values():  # its processes may open as many files as the user may
        assert psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)[0] == min(hard, 1 << 16)
    run.popen.send_signal(signal.SIGINT)
    code, out, err = run.end()
    assert code == 130, err
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert (tmp_path / "run" / "summary.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_to_every_process_saves_and_ends_as_one_to_the_supervisor_does(tmp_path, number):
    """As job schedulers, service managers and containers stop a job; the server may be gone first."""
    run = Run(tmp_path / "run", ENDLESS)
    pids = run.await_all().values()
    leashes = [child.pid for child in psutil.Process(run.popen.pid).children()]
    for pid in (*pids, *leashes, run.popen.pid):
        os.kill(pid, number)
    code, _, err = run.end(startup_s=0)
    assert code == 128 + number, err
    assert list((tmp_path / "run" / "checkpoints").iterdir()) and (tmp_path / "run" / "summary.json").exists()


TOLD = f"""
import signal, sys
from pathlib import Path

sys.path.insert(0, {str(Path(SUPERVISE).parent)!r})
import supervise_scripted

signal.signal(signal.SIGUSR2, lambda *_: sys.exit(7 if any(Path(sys.argv[1], "checkpoints").iterdir()) else 8))
sys.exit(supervise_scripted.main(*sys.argv[1:]))
"""


def test_who_asked_to_be_told_of_a_signal_is_told_once_the_run_has_saved(tmp_path):
    """Submitit queues a job again by a handler of its own, which ends the process."""
    run = Run(tmp_path / "run", ENDLESS, program=("-c", TOLD))
    run.await_all()
    run.popen.send_signal(signal.SIGUSR2)
    code, _, err = run.end(startup_s=0)
    assert code == 7, err


LEASH = """
import os, signal, sys, time
from agrpo.launch import leash

before_command = leash.before_command

def told_first():
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(0.3)
    before_command()

leash.before_command = told_first
leash.main([sys.executable, "-c", "import time; time.sleep(60)"])
"""


def test_a_signal_that_comes_as_a_process_is_started_reaches_it():
    """A process group of its own, which the leash ends with its supervisor."""
    assert subprocess.run([sys.executable, "-c", LEASH], start_new_session=True, timeout=30).returncode == -signal.SIGTERM


def test_a_signal_before_the_first_step_waits_for_nobody(tmp_path):
    """Trainers that end by it have told the rollout process nothing, for which it would be given fifteen seconds."""
    run = Run(tmp_path / "run", ("healthy", "freeze", "freeze", "roll_out"))
    for name in ("trainer0", "trainer1"):
        run.await_phase(name, "waiting for the trainer")
    run.await_phase("rollout", "generating")
    began = time.monotonic()
    run.popen.send_signal(signal.SIGTERM)
    code, _, err = run.end(startup_s=0)
    assert code == 143 and time.monotonic() - began < 10, err


def test_a_signal_is_heard_while_the_data_are_read(tmp_path):
    run = Run(tmp_path / "run", GOOD, ("data._target_=slow_data.Slow",))
    run.await_line("data: reading")
    began = time.monotonic()
    run.popen.send_signal(signal.SIGTERM)
    code, _, err = run.end(startup_s=0)
    assert code == 143 and time.monotonic() - began < 10, err


def test_second_signal_ends_at_once(tmp_path):
    run = Run(tmp_path / "run", ("healthy", "hang", "hang", "roll_out"))
    run.await_phase("trainer1", "stuck in a collective")
    run.await_phase("rollout", "generating")
    run.popen.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert run.popen.poll() is None
    began = time.monotonic()
    run.popen.send_signal(signal.SIGTERM)
    code, _, _ = run.end()
    assert code == 143 and time.monotonic() - began < 4


def test_a_reader_that_goes_away_ends_nothing(tmp_path):
    """As `| head`, or a `tee` that dies; neither may change how the run ends, nor its exit code."""
    run = Run(tmp_path / "run", GOOD)
    run.await_line("run ")
    run.popen.stdout.close()
    run.popen.stdout = None
    code, _, err = run.end()
    assert code == 0 and json.loads((tmp_path / "run" / "summary.json").read_text())["global_step"] == 10
    assert err == "warning: nothing more is written to the console: Broken pipe; the run goes on\n"


def test_a_reader_that_stops_reading_holds_nothing_up(tmp_path):
    """A halted terminal, a paused pager, a frozen connection: the run is watched, and saves when it is asked to."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 512)
    os.set_blocking(write, True)
    run = Run(tmp_path / "run", ENDLESS, stdout=write)
    os.close(write)
    run.await_all()
    run.popen.send_signal(signal.SIGTERM)
    code, _, err = run.end(startup_s=0)
    os.close(read)
    assert code == 143, err
    assert list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("ignores", [False, True])
def test_a_lost_terminal_saves_and_ends_the_run_unless_that_is_ignored(tmp_path, ignores):
    """The last process of a session whose terminal hangs up gets SIGHUP; nohup ignores it."""

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores else signal.SIG_DFL)

    ours, theirs = pty.openpty()
    folder = tmp_path / "run"
    run = Run(folder, GOOD if ignores else ENDLESS, stdin=theirs, stdout=theirs, start_new_session=True, preexec_fn=take_terminal)
    os.close(theirs)
    if ignores:
        os.read(ours, 1)
    else:
        run.await_all()
    os.close(ours)
    if not ignores:
        run.popen.send_signal(signal.SIGHUP)  # a shell passes on its own
    code, _, err = run.end()
    assert code == (0 if ignores else 129), err
    assert (folder / "summary.json").exists() and list((folder / "checkpoints").iterdir())


def test_a_folder_has_one_run_at_a_time(tmp_path):
    first = Run(tmp_path / "run", ENDLESS)
    first.await_all()
    second = Run(tmp_path / "run", ENDLESS, ("run.resume=auto",)).popen
    _, err = second.communicate(timeout=LIMIT_S)
    assert second.returncode == 3 and "another run is active" in err
    first.popen.send_signal(signal.SIGINT)
    first.end()


def test_a_folder_on_a_file_system_without_locks_can_be_used(tmp_path, monkeypatch):
    def unknown(file, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unknown)
    (tmp_path / "state").mkdir()
    run_folder._lock(tmp_path).close()


def test_a_rollout_process_that_reads_data_is_no_stall_while_the_trainer_waits():
    """Those of evaluations are read last, and may come over a slow network."""
    rollout = RolloutSettings(progress_timeout=1.5)
    watchdog = Watchdog(RunSettings(output_dir="run"), rollout)
    waiting = {"process": "trainer0", "phase": "waiting for samples"}
    watchdog._look_at_all([waiting, {"process": "rollout", "phase": LOADING}], [])
    watchdog._progress_at -= 60
    watchdog._look_at_all([waiting, {"process": "rollout", "phase": LOADING}], [])
    assert time.monotonic() - watchdog._progress_at < 30


def test_a_tail_gives_complete_lines_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n')
    tail = Tail(path)
    with path.open("a") as file:
        file.write('{"step": 2}\n{"st')
        file.flush()
        assert tail.new_rows() == [{"step": 2}]
        file.write('ep": 3}\n')
        file.flush()
        assert tail.new_rows() == [{"step": 3}]
        assert tail.new_rows() == []


def test_a_process_that_has_ended_unreaped_can_be_told_of():
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 20
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    facts = dump._of_process(psutil.Process(process.pid))
    process.wait()
    assert facts["status"] == "zombie" and facts["cmdline"] == []


def test_a_kill_for_lack_of_memory_is_told_from_any_other(tmp_path):
    child = Child("trainer0", subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE), tmp_path)
    child.popen.kill()
    child.popen.communicate()
    assert ending(child) == "was killed by SIGKILL"
    child.oom_kills -= 1  # as if the system had ended a process since it started
    assert "memory was used up" in ending(child)
