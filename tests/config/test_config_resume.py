"""Where a run starts: a folder that holds a run, a checkpoint that can or cannot be resumed."""

from pathlib import Path

from agrpo.config import check, compose
from agrpo.config.checkpoint_folder import start_of
from agrpo.config.devices import Devices
from tests.config.small import SMALL, problems


def test_a_finished_run_is_not_overwritten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "run.resume=auto" in problems(f"run.output_dir={tmp_path}")[0]
    assert problems(f"run.output_dir={tmp_path}", "run.resume=auto") == []


def _checkpoint(folder: Path, can_be_resumed: bool = True) -> Path:
    """The files by which a checkpoint is known, without their content."""
    (folder / "shards").mkdir(parents=True)
    (folder / "shards" / ".metadata").touch()
    if can_be_resumed:
        (folder / "updater.json").touch()
    return folder


def test_what_cannot_be_resumed_is_refused_before_the_run(tmp_path):
    first, last = (_checkpoint(tmp_path / "run" / "checkpoints" / f"step-{n:06d}") for n in (7, 11))
    model_only = _checkpoint(tmp_path / "small" / "checkpoints" / "step-000003", can_be_resumed=False)
    (tmp_path / "notes").mkdir()

    def found(value):
        return problems(f"run.output_dir={tmp_path / 'new'}", f"run.resume={value}")

    assert found(first) == found("auto") == []
    assert found(tmp_path / "run") == [f"run.resume: {tmp_path}/run is no checkpoint; its newest is run.resume={last}"]
    assert found(model_only) == [
        f"run.resume: {model_only} was saved with checkpoint.save_only_model=true and cannot be resumed"
    ]
    for folder in ("notes", "nowhere"):
        assert found(tmp_path / folder) == [
            f"run.resume: {tmp_path / folder} is no checkpoint; give a folder RUN/checkpoints/step-NNNNNN, or auto"
        ]


def test_where_a_run_starts_is_said_and_an_empty_auto_is_warned_of(tmp_path):
    def told(*overrides):
        config, warnings = check(compose([*SMALL, f"run.output_dir={tmp_path}", *overrides]), Devices())
        return start_of(config.run.resume, tmp_path), warnings

    assert told() == ("fresh, from step 0", [])
    start, (warning,) = told("run.resume=auto")
    assert start == "fresh, from step 0"
    assert warning.startswith(f"run.resume=auto found no checkpoint in {tmp_path}/checkpoints") and "run.output_dir" in warning
    _checkpoint(tmp_path / "checkpoints" / "step-000013")
    _checkpoint(tmp_path / "checkpoints" / "step-000017", can_be_resumed=False)
    assert told("run.resume=auto") == (f"step 13 ({tmp_path}/checkpoints/step-000013)", [])


def test_a_stream_that_is_resumed_is_said_to_begin_again(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "2 + 3"}], "solution": "5"}\n')
    _checkpoint(tmp_path / "run" / "checkpoints" / "step-000013")
    data = ("data=hub", f"data.path={tmp_path}/rows.jsonl", "run.max_steps=17", f"run.output_dir={tmp_path}/run", "run.resume=auto")
    told = [check(compose([*SMALL, *data, f"data.streaming={on}"]), Devices())[1] for on in ("true", "false")]
    assert told == [["run.resume: a stream (data.streaming=true) has no position, so its prompts begin again with the first one"], []]
