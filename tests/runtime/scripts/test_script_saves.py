"""Saves of an unchanged script: which are recorded, and which are set aside after a fault."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict

from hyperpod_ext.config.job.runtime import RuntimeConfig
from hyperpod_ext.errors import JobFailedError
from hyperpod_ext.runtime.ipc.environment import ENV_RUN_DIR
from hyperpod_ext.runtime.scripts import versions
from hyperpod_ext.runtime.scripts.record import Progress, SaveRecord, newest_of_all
from hyperpod_ext.runtime.scripts.saves import ScriptSaves
from hyperpod_ext.runtime.scripts.script_run import ScriptRun
from hyperpod_ext.runtime.scripts.steps import ScriptSteps
from hyperpod_ext.runtime.training.restore import SoloLink
from hyperpod_ext.runtime.training.run import Run


class Link(SoloLink):
    """The link of rank 0, next to a rank that has finished the saves of step `all_saved`."""

    def __init__(self, all_saved: int) -> None:
        super().__init__()
        files = {step: 1 for step in (5, 10, 15) if step <= all_saved}
        self.other = json.dumps({"made": all_saved, "by_all": all_saved, "newest": all_saved, "files": files})
        self.events: list[tuple[str, dict[str, Any]]] = []

    def agree(self, topic: str, text: str, choose: Callable[[Sequence[str]], str]) -> str:
        return choose([text, self.other])

    def event(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))


class Process:
    """A process of the script; each new one is that after a restart."""

    def __init__(self, all_saved: int = 0, generation: int = 1) -> None:
        self.link = Link(all_saved)
        run = Run(RuntimeConfig(name="job", nodes=1, workers_per_node=2), 0, 0, self.link, None)
        run.generation = generation
        self.run = ScriptRun(run)
        self.saves = ScriptSaves(self.run)

    def make(self, *steps: int, save: Callable[[int], None]) -> None:
        """Make the steps, saving each."""
        with self.saves.recorded():
            for step in steps:
                self.run._set(step)
                save(step)

    def restart(self, all_saved: int, generation: int = 2) -> Process:
        """Return the process after a fault, when `all_saved` is the newest step that the other rank has saved."""
        made, by_all = self.run.steps.get()
        self.run.steps.set(made, max(by_all, all_saved))
        after = Process(all_saved, generation)
        after.saves.go_back()
        return after

    @property
    def aside(self) -> list[str]:
        return [path for kind, fields in self.link.events if kind == "saves_set_aside" for path in fields["paths"]]


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENV_RUN_DIR, str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "saves").mkdir()
    return tmp_path / "saves"


def step_in(file: Path) -> int:
    return int(torch.load(file, weights_only=True)["step"])


def test_a_file_that_was_replaced_comes_back(folder: Path, run_dir: Path) -> None:
    last = folder / "last.pt"
    before = Process()
    before.make(5, 10, save=lambda step: torch.save({"step": step}, last))
    after = before.restart(all_saved=5)
    assert (step_in(last), after.run.step, after.aside) == (5, 5, [str(last)])
    assert [step_in(each) for each in (run_dir / "set-aside").rglob("*.pt")] == [10]
    with after.saves.recorded():
        torch.load(last, weights_only=True)
    assert after.saves.loaded == 5
    again = after.restart(all_saved=5, generation=3)
    assert (step_in(last), again.aside) == (5, []), "a second restart moves nothing"


def test_a_restart_that_was_cut_off_is_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newer file has been moved, and the former one is not back yet."""
    last = folder / "last.pt"
    before = Process()
    before.make(5, 10, save=lambda step: torch.save({"step": step}, last))
    with monkeypatch.context() as patched:
        patched.setattr(versions.Versions, "put_back", lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            before.restart(all_saved=5)
    assert not last.exists()
    before.restart(all_saved=5, generation=3)
    assert step_in(last) == 5


@pytest.mark.parametrize("all_saved", [5, 10])
def test_a_replacement_that_was_cut_off_is_finished(
    folder: Path, monkeypatch: pytest.MonkeyPatch, all_saved: int
) -> None:
    """Without that, a process would load a file that is newer or older than its record."""
    process, replace = Process(), Path.replace

    def cut(self: Path, target: Path) -> Path:
        if process.run.step == 10 and self.name.endswith(".unfinished"):
            os.link(self, folder / "kept")  # a killed process would not remove it
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", cut)
    with pytest.raises(KeyboardInterrupt):
        process.make(5, 10, save=lambda step: torch.save({"step": step}, folder / "last.pt"))
    monkeypatch.undo()
    assert step_in(folder / "last.pt") == 5
    (folder / "kept").rename(folder / ".last.pt.rank0.unfinished")
    monkeypatch.setenv(ENV_RUN_DIR, str(process.run.run_dir))
    after = process.restart(all_saved=all_saved)
    assert step_in(folder / "last.pt") == all_saved
    assert after.aside == ([str(folder / "last.pt")] if all_saved == 5 else [])
    assert [file.name for file in folder.iterdir()] == ["last.pt"]


def test_a_file_of_an_earlier_run_comes_back(folder: Path) -> None:
    last = folder / "last.pt"
    torch.save({"step": 70}, last)
    before = Process()
    before.make(5, save=lambda step: torch.save({"step": step}, last))
    before.restart(all_saved=0)
    assert step_in(last) == 70


def test_the_former_file_is_kept_for_one_save(folder: Path, run_dir: Path) -> None:
    before = Process()
    before.make(5, 10, 15, save=lambda step: torch.save({"step": step}, folder / "last.pt"))
    assert [step_in(each) for each in (run_dir / "former").iterdir()] == [10]
    before.saves.end()
    assert not (run_dir / "former").exists()


def test_removed_saves_are_forgotten(folder: Path) -> None:
    before = Process()
    before.make(5, 10, save=lambda step: torch.save({"step": step}, folder / "last.pt"))
    (folder / "last.pt").unlink()
    after = before.restart(all_saved=0)
    assert (after.aside, after.run.step, [*folder.iterdir()]) == ([], 0, [])


def save_and_rename(folder: Path, step: int) -> None:
    torch.save({"step": step}, folder / "tmp")
    os.replace(folder / "tmp", folder / "last.pt")  # noqa: PTH105  (as scripts do it)


def save_to_stream_and_rename(folder: Path, step: int) -> None:
    with (folder / "tmp").open("wb") as stream:
        torch.save({"step": step}, stream)
    (folder / "tmp").rename(folder / "last.pt")


@pytest.mark.parametrize("save", [save_and_rename, save_to_stream_and_rename])
def test_a_file_that_the_script_renames_is_followed(folder: Path, save: Callable[[Path, int], None]) -> None:
    before = Process()
    before.make(5, 10, 15, save=lambda step: save(folder, step))
    after = before.restart(all_saved=10)
    assert (step_in(folder / "last.pt"), after.aside) == (10, [str(folder / "last.pt")])


def test_a_folder_of_one_step_is_moved_whole(folder: Path, run_dir: Path) -> None:
    def save(step: int) -> None:
        (folder / f"checkpoint-{step}" / "more").mkdir(parents=True)
        torch.save({"step": step}, folder / f"checkpoint-{step}" / "model.pt")
        (folder / f"checkpoint-{step}" / "state.json").write_text("{}")

    before = Process()
    before.make(5, 10, save=save)
    after = before.restart(all_saved=5)
    assert after.aside == [str(folder / "checkpoint-10")]
    assert [path.name for path in folder.iterdir()] == ["checkpoint-5"]
    assert len(list((run_dir / "set-aside").rglob("state.json"))) == 1


def test_a_folder_whose_first_save_was_cut_off_is_moved(folder: Path) -> None:
    class Cut:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    def save(step: int) -> None:
        (folder / f"checkpoint-{step}").mkdir()
        (folder / f"checkpoint-{step}" / "config.json").write_text("{}")
        torch.save({"step": step if step == 5 else Cut()}, folder / f"checkpoint-{step}" / "model.pt")

    before = Process()
    before.make(5, save=save)
    with pytest.raises(KeyboardInterrupt):
        before.make(10, save=save)
    before.restart(all_saved=5)
    assert [path.name for path in folder.iterdir()] == ["checkpoint-5"]


def save_folder(step: int, folder: Path) -> None:
    dcp.save({"step": torch.tensor(step)}, checkpoint_id=folder / "newest")


def step_of(folder: Path) -> int:
    dcp.load({"step": (step := torch.tensor(0))}, checkpoint_id=folder / "newest")
    return int(step)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_was_replaced_comes_back(folder: Path, run_dir: Path) -> None:
    before = Process()
    before.make(5, 10, 15, save=lambda step: save_folder(step, folder))
    assert [path.name for path in folder.iterdir()] == ["newest"]
    after = before.restart(all_saved=10)
    assert (step_of(folder), after.aside) == (10, [str(folder / "newest")])
    assert len(list((run_dir / "set-aside").rglob(".metadata"))) == 1
    after.saves.end()
    assert not (run_dir / "former").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_that_is_saved_twice_in_a_step_comes_back(folder: Path) -> None:
    before = Process()
    before.make(5, 10, 10, save=lambda step: save_folder(step, folder))
    before.restart(all_saved=5)
    assert step_of(folder) == 5


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_an_earlier_run_comes_back(folder: Path) -> None:
    save_folder(70, folder)
    before = Process()
    before.make(5, save=lambda step: save_folder(step, folder))
    before.restart(all_saved=0)
    assert step_of(folder) == 70


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_replacement_of_a_folder_that_was_cut_off_is_undone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The former folder has been moved, and the new one has not yet."""
    rename = Path.rename

    def cut(self: Path, target: Path) -> Path:
        if self.name == ".newest.unfinished":
            raise KeyboardInterrupt
        return rename(self, target)

    save_folder(70, folder)
    before = Process()
    monkeypatch.setattr(Path, "rename", cut)
    with pytest.raises(KeyboardInterrupt):
        before.make(5, save=lambda step: save_folder(step, folder))
    assert not (folder / "newest").exists()
    before.restart(all_saved=0)
    assert step_of(folder) == 70


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint")
def test_a_folder_with_other_files_is_overwritten_in_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "newest").mkdir()
    (folder / "newest" / "log.txt").write_text("of the script")
    before = Process()
    before.make(5, save=lambda step: save_folder(step, folder))
    assert capsys.readouterr().err == ""
    before.make(10, save=lambda step: save_folder(step, folder))
    assert "newest has a checkpoint, which this save overwrites in place" in capsys.readouterr().err
    after = before.restart(all_saved=5)
    assert (step_of(folder), after.aside) == (10, [])
    assert (folder / "newest" / "log.txt").read_text() == "of the script"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_writer_keeps_its_folder_and_its_refusal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = dcp.FileSystemWriter(folder / "newest", overwrite=False)
    before = Process()
    before.make(5, save=lambda step: dcp.save({"step": torch.tensor(step)}, storage_writer=writer))
    with pytest.raises(dcp.api.CheckpointException):
        before.make(10, save=lambda step: dcp.save({"step": torch.tensor(step)}, storage_writer=writer))
    assert step_of(folder) == 5
    assert capsys.readouterr().err == ""
    writer = dcp.FileSystemWriter(folder / "newest")
    before.make(15, save=lambda step: dcp.save({"step": torch.tensor(step)}, storage_writer=writer))
    assert (step_of(folder), writer.path) == (15, folder / "newest")


def test_a_url_is_no_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(dcp, "save", lambda state, **options: seen.append(options))
    Process().make(5, save=lambda step: dcp.save({}, checkpoint_id="s3://bucket/newest"))
    assert seen == [{"checkpoint_id": "s3://bucket/newest"}]


def test_folders_without_saves_stay(folder: Path) -> None:
    def save(step: int) -> None:
        (folder / f"cache-{step}").mkdir()
        torch.save({"step": step}, folder / f"step-{step}.pt")

    before = Process()
    before.make(5, 10, save=save)
    before.restart(all_saved=5)
    assert sorted(path.name for path in folder.iterdir()) == ["cache-10", "cache-5", "step-5.pt"]


def test_other_peoples_files_stay(folder: Path, tmp_path: Path) -> None:
    """A file that another program has replaced since, and a link in the place of a file."""

    def save(step: int) -> None:
        for name in ("replaced", "linked", "own"):
            torch.save({"step": step}, folder / f"{name}-{step}.pt")

    before = Process()
    before.make(5, 10, save=save)
    (folder / "replaced-10.pt").write_text("of another program")
    shutil.move(folder / "linked-10.pt", tmp_path / "elsewhere.pt")
    (folder / "linked-10.pt").symlink_to(tmp_path / "elsewhere.pt")
    after = before.restart(all_saved=5)
    assert after.aside == [str(folder / "own-10.pt")]
    assert (folder / "replaced-10.pt").read_text() == "of another program"
    assert (folder / "linked-10.pt").is_symlink()
    assert step_in(tmp_path / "elsewhere.pt") == 10


def test_a_file_stays_if_its_former_version_is_lost(folder: Path) -> None:
    def save(step: int) -> None:
        with (folder / "last.pt").open("wb") as stream:
            torch.save({"step": step}, stream)

    before = Process()
    before.make(5, 10, save=save)
    after = before.restart(all_saved=5)
    assert (step_in(folder / "last.pt"), after.aside) == (10, [])
    with after.saves.recorded():
        torch.load(folder / "last.pt", weights_only=True)
    assert after.saves.loaded == 10, "so that the coordinator sees that ranks differ"


def test_another_file_system(folder: Path, run_dir: Path) -> None:
    here = Path("/dev/shm") / f"hpx-test-{os.getpid()}"
    here.mkdir()
    try:
        if here.stat().st_dev == folder.stat().st_dev:
            pytest.skip("/dev/shm is on the file system of the tests")
        before = Process()
        before.make(5, 10, save=lambda step: torch.save({"step": step}, here / "last.pt"))
        after = before.restart(all_saved=5)
        assert (step_in(here / "last.pt"), after.aside) == (5, [str(here / "last.pt")])
        assert len(list((here / ".hpx-saves" / "set-aside").rglob("*.pt"))) == 1
        assert list((run_dir / "set-aside").rglob("*.pt")) == []
        after.make(10, 15, save=lambda step: torch.save({"step": step}, here / "last.pt"))
        after.saves.end()
        assert [path.name for path in (here / ".hpx-saves").iterdir()] == ["set-aside"]
    finally:
        shutil.rmtree(here)


def test_a_file_that_cannot_be_moved_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Process()
    before.make(5, 10, save=lambda step: torch.save({"step": step}, folder / f"step-{step}.pt"))

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(versions, "_rename", refuse)
    with pytest.raises(JobFailedError, match=r"step-10\.pt cannot be moved away: Permission denied"):
        before.restart(all_saved=5)


@pytest.fixture
def safetensors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in with the functions that safetensors' own `save_file` and `load_file` call."""
    package, module = types.ModuleType("safetensors"), types.ModuleType("safetensors.torch")
    package.__spec__ = module.__spec__ = types.SimpleNamespace()  # type: ignore[assignment]
    state: Any = module
    state.serialize_file = lambda tensors, filename, metadata=None: Path(filename).write_text(json.dumps(tensors))
    state.safe_open = lambda filename, framework, device="cpu": Path(filename).read_bytes()
    state.save_file = lambda tensors, filename: state.serialize_file(tensors, filename, metadata=None)
    state.load_file = lambda filename: json.loads(state.safe_open(filename, framework="pt"))
    monkeypatch.setitem(sys.modules, "safetensors", package)
    monkeypatch.setitem(sys.modules, "safetensors.torch", module)
    return module


def test_safetensors_are_recorded(folder: Path, safetensors: Any) -> None:
    """Also through a name that a library imported before."""
    save_file, load_file = safetensors.save_file, safetensors.load_file
    last = folder / "model.safetensors"
    before = Process()
    before.make(5, 10, save=lambda step: save_file({"step": step}, last))
    after = before.restart(all_saved=5)
    with after.saves.recorded():
        assert load_file(last) == {"step": 5}
    assert after.saves.loaded == 5


@pytest.mark.parametrize("load", [torch.load, None])
def test_a_load_of_something_else_has_no_step(folder: Path, load: Any) -> None:
    import io

    buffer = io.BytesIO()
    torch.save({}, buffer)
    buffer.seek(0)
    process = Process()
    with process.saves.recorded():
        if load is not None:
            torch.load(buffer, weights_only=True)
    assert process.saves.loaded == (0 if load is not None else None)


def test_child_processes_record_nothing(folder: Path) -> None:
    process = Process()
    with process.saves.recorded():
        process.run._set(5)
        if not (pid := os.fork()):
            torch.save({"step": 5}, folder / "of-a-loader.pt")
            os._exit(0)
        os.waitpid(pid, 0)
    assert (folder / "of-a-loader.pt").exists()
    assert SaveRecord.read(process.run.record_of(0)).saves == {}


def test_a_folder_that_cannot_be_written_keeps_its_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file itself may be writable, as without our temporary file."""
    last = folder / "last.pt"
    torch.save({"step": 3}, last)
    process = Process()
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
    process.make(5, save=lambda step: torch.save({"step": step}, last))
    assert step_in(last) == 5
    assert SaveRecord.read(process.run.record_of(0)).saves[str(last)].lost


@pytest.mark.parametrize(
    ("ranks", "newest"),
    [
        # one rank saves; the other one makes steps only
        ([(12, 0, {5: 1, 10: 1}), (12, 0, {})], 10),
        ([(10, 0, {5: 1, 10: 1}), (10, 0, {})], 10),
        ([(10, 0, {5: 1, 10: 1}), (9, 0, {})], 10),
        # the first save: nobody knows yet whether the other rank saves, too
        ([(5, 0, {5: 1}), (5, 0, {})], 0),
        ([(6, 0, {5: 1}), (5, 0, {})], 0),
        ([(6, 0, {5: 1}), (6, 0, {})], 5),
        # each rank saves
        ([(10, 0, {5: 1, 10: 1}), (10, 0, {5: 1})], 5),
        ([(10, 0, {5: 1, 10: 1}), (10, 0, {5: 1, 10: 1})], 10),
        ([(5, 0, {5: 1}), (5, 0, {5: 1})], 0),
        # several files a step
        ([(10, 0, {5: 3, 10: 2}), (10, 0, {5: 1, 10: 1})], 5),
        ([(11, 0, {5: 3, 10: 2}), (11, 0, {5: 1, 10: 1})], 10),
        # a rank that saves seldom
        ([(20, 0, {5: 1, 10: 1, 15: 1}), (20, 0, {1: 1})], 15),
        # known from an earlier restart
        ([(5, 5, {5: 1}), (5, 5, {})], 5),
        # a lost record does not count
        ([(12, 0, {5: 1, 10: 1}), (0, 0, {})], 10),
        ([(0, 0, {}), (0, 0, {})], 0),
    ],
)
def test_the_newest_step_of_all_ranks(ranks: list[tuple[int, int, dict[int, int]]], newest: int) -> None:
    assert newest_of_all([Progress(made, by_all, 0, files) for made, by_all, files in ranks]) == newest


def test_the_step_with_which_dcp_creates_an_optimizer_s_state_is_not_counted(folder: Path, run_dir: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    process = Process()
    with ScriptSteps(process.run, process.saves).counted():
        get_state_dict(model, optimizer)
        assert optimizer.state, "DCP has made a step"
        assert process.link.events == []
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [(event, fields["step"]) for event, fields in process.link.events] == [("begun", 0), ("step", 1)]
