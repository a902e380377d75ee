"""A folder that is replaced is whole at every moment, and nothing half deleted keeps a checkpoint's name."""

import threading

import pytest

from agrpo.config.checkpoint_folder import complete, newest, set_aside
from agrpo.model import checkpoint, folders


def written(folder, text):
    (folder / "shards").mkdir(parents=True)
    for name in ("shards/.metadata", "updater.json", "text"):
        (folder / name).write_text(text)
    return folder


def test_there_is_always_a_folder_while_it_is_replaced(tmp_path):
    """Also for one that keeps a single checkpoint: the last save of a run replaces that of its last step."""
    folder, missing, is_over = written(tmp_path / "step-000007", "0"), [], threading.Event()
    beside = written(tmp_path / ".step-000007", "1")
    folders.replace(folder, beside)
    if not folders._exchanged(folder, written(tmp_path / ".other", "2")):
        pytest.skip("this file system cannot exchange two names")

    def look() -> None:
        while not is_over.is_set():
            if not (folder / "text").exists():
                missing.append(1)

    watching = threading.Thread(target=look)
    watching.start()
    for number in range(200):
        folders.replace(folder, written(tmp_path / ".step-000007", str(number)))
    is_over.set()
    watching.join()
    assert (folder / "text").read_text() == "199" and not missing
    assert not (tmp_path / ".step-000007").exists()


def test_a_folder_that_is_new_gets_its_name(tmp_path):
    folders.replace(tmp_path / "model", written(tmp_path / ".model", "1"))
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_limit_hides_a_checkpoint_before_it_deletes_it(tmp_path):
    for step in (2, 4, 6):
        written(tmp_path / f"step-{step:06d}", str(step))
    written(tmp_path / ".step-000002.removed", "of a run that was killed meanwhile")
    checkpoint.prune(tmp_path, 1)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000006"]


def test_a_checkpoint_of_another_course_is_set_aside_and_can_still_be_named(tmp_path):
    paths = [written(tmp_path / f"step-{step:06d}", str(step)) for step in (2, 4, 6)]
    assert set_aside(tmp_path, 6, paths[2]) == [] and newest(tmp_path) == paths[2]
    assert [p.name for p in set_aside(tmp_path, 4, paths[1])] == ["left-1-step-000006"]
    assert newest(tmp_path) == paths[1]
    written(paths[2], "again")
    checkpoint.prune(tmp_path, 1)
    assert complete(tmp_path) == [paths[2]] and (tmp_path / "left-1-step-000006" / "text").read_text() == "6"
    elsewhere = written(tmp_path / "other" / "step-000006", "of another run")
    assert [p.name for p in set_aside(tmp_path, 6, elsewhere)] == ["left-2-step-000006"]
