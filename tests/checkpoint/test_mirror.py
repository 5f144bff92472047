"""The copy of a run in another storage: whole wherever it is cut off, and never a reason for the run to stop."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from bench.runs import frugal_train, prepared, records
from frugal import files, storages
from frugal.checkpoint import manifest, mirror
from frugal.checkpoint.manifest import MANIFEST, Manifest, file_entry, publish
from frugal.config.run_settings import RunSettings
from frugal.distributed import stop
from frugal.errors import CheckpointError
from tests.commands import Capture
from tests.engine.corpora import refusal

ADDRESS = "memory://bucket/run"


def checkpoint(settings: RunSettings, step: int, content: bytes = b"state") -> Path:
    """Write a checkpoint of three files, as the saver does."""
    folder = settings.checkpoints / f"step-{step:06d}.tmp"
    folder.mkdir(parents=True)
    (folder / "training.json").write_text(f'{{"step": {step}}}')
    (folder / "a_model_states.pt").write_bytes(content * step)
    (folder / "extra.pt").write_bytes(b"")
    made_by = Manifest(
        step=step, world_size=1, zero_stage=0, offload=("none", "none"), strategy="", optimizer="", model="", shapes="",
        recipe={}, plan_digest="", versions={},
        files={path.name: file_entry(path, 0) for path in sorted(folder.iterdir())},
    )  # fmt: skip
    files.record_written(settings.checkpoints, {*files.written(settings.checkpoints), folder.name})
    for name in ("plan.json", "train.json", "metrics.jsonl"):
        (settings.out / name).write_text(f"{name} at {step}")
    return publish(folder, made_by)


def run_in(folder: Path, address: str = ADDRESS, **settings: Any) -> RunSettings:
    return RunSettings(out=folder / "run", mirror=address, **settings)


def copied(settings: RunSettings, seconds: float = 20.0) -> None:
    copy = mirror.Mirror(str(settings.mirror), settings.out)
    copy.wake()
    copy.close(seconds)


def fetched(folder: Path, address: str = ADDRESS) -> RunSettings:
    """The settings of a run on an empty disk, after fetching."""
    settings = run_in(folder, address)
    mirror.fetch_if_empty(address, settings.out)
    return settings


def contents(folder: Path) -> dict[str, bytes]:
    kept = (path for path in folder.rglob("*") if path.is_file() and path.name != files.WRITTEN)
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


@pytest.fixture
def store() -> Iterator[dict[str, Any]]:
    """Yield what is in the storage in memory."""
    yield MemoryFileSystem.store
    for thread in threading.enumerate():
        if thread.name == "mirror":
            thread.join(20)
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def wait_for(store: dict[str, Any], step: int) -> None:
    """Wait until a checkpoint is whole in the storage."""
    for _ in range(3000):
        if any(name.endswith(f"step-{step:06d}/{MANIFEST}") for name in list(store)):
            return
        time.sleep(0.01)
    raise AssertionError(f"{sorted(store)} has no whole checkpoint of step {step}")


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let the storage do a number of things; all later ones fail, and a file is written in part.

    `by`: what is raised; SystemExit ends the thread, as if its process was killed.
    """
    left: list[Any] = [10**9, ConnectionError]

    def limited(name: str) -> None:
        plain = getattr(MemoryFileSystem, name)

        def method(self: Any, path: str, *more: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and name == "put_file":
                MemoryFileSystem.pipe_file(self, more[0], Path(path).read_bytes()[:-1])
            if left[0] <= 0:
                raise left[1]("the connection was cut")
            return plain(self, path, *more, **options)

        monkeypatch.setattr(MemoryFileSystem, name, method)

    for name in ("ls", "cat_file", "put_file", "rm"):
        limited(name)
    monkeypatch.setattr(mirror, "RETRY_SECONDS", (0.01, 0.01))

    def cut_after(number: int, by: type[BaseException] = ConnectionError) -> None:
        left[:] = number, by

    return cut_after


def test_an_empty_disk_gets_the_newest_checkpoint_and_what_a_run_is_resumed_with(
    tmp_path: Path, store: dict[str, Any]
) -> None:
    settings = run_in(tmp_path / "a")
    for step in (100, 200):
        checkpoint(settings, step)
    copied(settings)
    there = fetched(tmp_path / "b")
    expected = {name: data for name, data in contents(settings.out).items() if "step-000100" not in name}
    assert contents(there.out) == expected
    assert [path.name for path in manifest.checkpoints_in(there.checkpoints)] == ["step-000200"]
    assert files.written(there.checkpoints) == {"step-000200"}, "so that it is pruned like any other"


def test_checkpoints_that_were_pruned_here_are_removed_there(tmp_path: Path, store: dict[str, Any]) -> None:
    settings = run_in(tmp_path)
    first = checkpoint(settings, 100)
    copy = mirror.Mirror(ADDRESS, settings.out)
    copy.wake()
    wait_for(store, 100)
    files.remove(first)
    checkpoint(settings, 200)
    copy.close(20)
    assert {name.split("/")[4] for name in store if "step-" in name} == {"step-000200"}


@pytest.mark.parametrize("number", range(1, 40))
def test_wherever_a_copy_is_cut_off_what_can_be_fetched_is_whole_and_the_next_copy_completes_it(
    number: int, tmp_path: Path, store: dict[str, Any], cut: Callable[..., None], capsys: Capture
) -> None:
    settings = run_in(tmp_path / "a")
    checkpoint(settings, 100)
    copied(settings)
    files.remove(settings.checkpoints / "step-000100")
    checkpoint(settings, 200)
    cut(number, by=SystemExit)
    again = run_in(tmp_path / "a", resume=True)
    copied(again)
    cut(10**9)
    there = fetched(tmp_path / "b")
    newest = manifest.newest_checkpoint(there.checkpoints)
    assert newest is not None and newest.name in ("step-000100", "step-000200")
    assert manifest.first_damage(newest, manifest.read(newest), 0, 1) is None
    copied(again)
    newest = manifest.newest_checkpoint(fetched(tmp_path / "c").checkpoints)
    assert newest is not None and newest.name == "step-000200"
    assert not [name for name in store if "step-000100" in name]


def test_a_cut_connection_is_said_once_and_tried_again(
    tmp_path: Path, store: dict[str, Any], cut: Callable[..., None], capsys: Capture
) -> None:
    settings = run_in(tmp_path)
    checkpoint(settings, 100)
    cut(4)
    copy = mirror.Mirror(ADDRESS, settings.out)
    copy.wake()
    time.sleep(0.2)
    cut(10**9)
    copy.close(20)
    said = capsys.readouterr().err
    assert said.count(f"warning: the mirror {ADDRESS} cannot be written (ConnectionError: the connection was cut)") == 1
    assert f"the mirror {ADDRESS} is written again\n" in said
    assert any(name.endswith(f"step-000100/{MANIFEST}") for name in store)


def test_a_slow_storage_gets_all_of_a_checkpoint_that_is_removed_meanwhile(
    tmp_path: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, put, waiting, go = run_in(tmp_path), MemoryFileSystem.put_file, threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> None:
        waiting.set()
        go.wait(20)
        put(*arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", slow)
    first = checkpoint(settings, 100)
    copy = mirror.Mirror(ADDRESS, settings.out)
    copy.wake()
    assert waiting.wait(20)
    files.remove(first)
    go.set()
    wait_for(store, 100)
    copy.close(20)
    newest = manifest.newest_checkpoint(fetched(tmp_path / "b").checkpoints)
    assert newest is not None and newest.name == "step-000100"
    assert not (settings.out / ".mirror").exists()


def test_a_checkpoint_that_is_removed_before_it_has_a_second_name_is_passed_over(
    tmp_path: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    settings, mkdir = run_in(tmp_path), Path.mkdir
    checkpoint(settings, 200)
    first = checkpoint(settings, 100)

    def remove_first(folder: Path, *arguments: Any, **options: Any) -> None:
        if folder.parent.name == ".mirror":
            (first / MANIFEST).unlink(missing_ok=True)
        mkdir(folder, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", remove_first)
    copied(settings)
    assert capsys.readouterr().err == ""
    assert any(name.endswith(f"step-000200/{MANIFEST}") for name in store)


def test_a_storage_without_an_answer_is_not_waited_for_and_what_it_lacks_is_said(
    tmp_path: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    settings, forever = run_in(tmp_path), threading.Event()
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: forever.wait(60))
    checkpoint(settings, 100)
    monkeypatch.setattr(stop, "under_way", "the step")
    with mirror.beside(ADDRESS, settings.out, grace=1) as copy:
        copy()
    assert stop.under_way == f"the copy to the mirror {ADDRESS}", "for a signal that comes now"
    forever.set()
    said = capsys.readouterr().err
    assert "is not complete, lacks step-000100 (it took longer than 1 s)" in said


@pytest.mark.parametrize(
    ("address", "why"), [("file:///dev/null/run", "NotADirectoryError"), (ADDRESS, "TimeoutError")]
)
def test_a_storage_that_cannot_be_used_is_told_before_the_run(
    address: str, why: str, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(mirror, "PROBE_SECONDS", 0.2)
    forever = threading.Event()
    if address == ADDRESS:
        mirror.warn_if_unreachable(address)
        assert capsys.readouterr().err == "", "it answers"
        monkeypatch.setattr(MemoryFileSystem, "makedirs", lambda *_, **__: forever.wait(60))
    mirror.warn_if_unreachable(address)
    forever.set()
    assert capsys.readouterr().err.startswith(f"warning: the mirror {address} cannot be used now ({why}")


def test_a_storage_that_keeps_less_than_it_was_given_is_found_out(
    tmp_path: Path, store: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    settings = run_in(tmp_path)
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda self, _, to, **__: self.pipe_file(to, b"x"))
    checkpoint(settings, 100)
    copied(settings, seconds=0.5)
    assert "step-000100/a_model_states.pt has 1 of 500 bytes there" in capsys.readouterr().err
    assert not any(name.endswith(MANIFEST) for name in store)


def test_a_damaged_checkpoint_is_refused_for_the_one_before(
    tmp_path: Path, store: dict[str, Any], capsys: Capture
) -> None:
    settings = run_in(tmp_path / "a")
    for step in (100, 200):
        checkpoint(settings, step)
    copied(settings)
    file = next(store[name] for name in store if name.endswith("step-000200/a_model_states.pt"))
    file.seek(0)
    file.write(b"S")
    newest = manifest.newest_checkpoint(fetched(tmp_path / "b").checkpoints)
    assert newest is not None and newest.name == "step-000100"
    assert "refused a checkpoint of the mirror:" in capsys.readouterr().err


def test_another_run_s_folder_is_left_alone(tmp_path: Path, store: dict[str, Any], capsys: Capture) -> None:
    first = run_in(tmp_path / "a")
    checkpoint(first, 100)
    copied(first)
    before = {name: bytes(file.getbuffer()) for name, file in store.items()}
    for is_resumed in (False, True):
        other = run_in(tmp_path / f"b{is_resumed}", resume=is_resumed)
        checkpoint(other, 300)
        copied(other)
    assert {name: bytes(file.getbuffer()) for name, file in store.items()} == before
    assert f"the mirror {ADDRESS} holds another run: nothing is copied to it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("s3://me:hunter2@bucket/run", "has credentials in its address\n  because it is kept in the run's record"),
        ("https://host/run?sig=hunter2", "has credentials in its address\n"),
        ("nothing://bucket/run", "--mirror nothing://bucket/run cannot be used\n  because ValueError: "),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_anything_is_started(address: str, said: str) -> None:
    message = refusal(lambda: storages.check("--mirror", address))
    assert said in message and "hunter2" not in message


def test_a_storage_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    assert refusal(lambda: storages.check("--mirror", "s3://bucket/run")) == (
        "--mirror s3://bucket/run cannot be used\n  because ImportError: Install s3fs to access S3\n\n"
        "hint: pip install 'frugal-trainer[s3]'"
    )


def test_what_variables_for_credentials_have_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-long-secret")
    assert storages.explained(OSError("key a-long-secret refused")) == "OSError: key <AWS_SECRET_ACCESS_KEY> refused"


def test_a_storage_that_cannot_be_read_ends_a_run_that_has_nothing_else(
    tmp_path: Path, store: dict[str, Any], cut: Callable[..., None]
) -> None:
    cut(0)
    with pytest.raises(CheckpointError, match=f"cannot fetch a checkpoint from {ADDRESS}"):
        fetched(tmp_path)


class Proxy:
    """A connection to a server that is cut after a number of bytes; later ones are not, once `heals`."""

    def __init__(self, port: int, most_bytes: int) -> None:
        self.server, self.target, self.left = socket.create_server(("127.0.0.1", 0)), port, most_bytes
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            client, _ = self.server.accept()
            there = socket.create_connection(("127.0.0.1", self.target))
            for one, other in ((client, there), (there, client)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(4096):
                was = self.left
                self.left -= len(data)
                if was > 0 >= self.left:
                    data = data[: len(data) // 2]
                other.sendall(data)
                if was > 0 >= self.left:
                    break
        except OSError:
            pass
        for each in (one, other):
            each.close()


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A server of S3 on loopback with one bucket; its port."""
    moto = pytest.importorskip("moto.server", reason="moto[s3] and flask are dependencies of tests")
    pytest.importorskip("s3fs")
    import s3fs

    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    variables = {
        "AWS_ACCESS_KEY_ID": "an-access-key", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-storage",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(endpoint_url=variables["AWS_ENDPOINT_URL"]).mkdir("bucket")
    yield port
    urlopen(Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")).close()
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.mark.parametrize("most_bytes", [700, 20_000, 300_000, 1_500_000])
def test_connections_to_s3_that_are_cut_lose_nothing(
    most_bytes: int, s3: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import s3fs

    proxy = Proxy(s3, most_bytes)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
    monkeypatch.setattr(mirror, "RETRY_SECONDS", (0.05, 0.05))
    s3fs.S3FileSystem.clear_instance_cache()
    settings = run_in(tmp_path / "a", "s3://bucket/run")
    checkpoint(settings, 200, b"0123456789" * 1000)
    copied(settings, seconds=60)
    assert contents(fetched(tmp_path / "b", "s3://bucket/run").out) == contents(settings.out)
    assert proxy.left < 0


def test_a_run_goes_on_another_machine_from_what_is_in_s3(s3: int, tmp_path: Path) -> None:
    folder = prepared(tmp_path, 1)
    run = ("--plan", "plan1.json", "--data", "text.jsonl", "--save-every", 2, "--keep", 1, "--schedule", "constant")
    code, _, errors = frugal_train(folder, *run, "--steps", 4, "--out", "one", "--mirror", "s3://bucket/run")
    assert (code, errors) == (0, "")
    (folder / "one").rename(folder / "lost")
    code, output, errors = frugal_train(folder, "--resume", "--steps", 6, "--out", "two", "--mirror", "s3://bucket/run")
    assert (code, errors) == (0, "fetching the newest checkpoint from s3://bucket/run\n"), output
    assert frugal_train(folder, *run, "--steps", 6, "--out", "whole")[0] == 0
    losses = [
        {record["step"]: record["loss"] for record in records(folder / name) if record["event"] == "step"}
        for name in ("two", "whole")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 6, "with the metrics of the steps before"
    kept = b"".join(path.read_bytes() for path in folder.rglob("*") if path.suffix in (".json", ".jsonl", ".log"))
    assert b"a-secret-of-the-storage" not in kept and b"s3://bucket/run" in kept
    code, output, errors = frugal_train(folder, *run, "--steps", 2, "--out", "three", "--mirror", "s3://bucket/run")
    assert code == 0 and "holds another run: nothing is copied to it" in errors


@pytest.mark.parametrize("problem", ["no server", pytest.param("no bucket", marks=pytest.mark.exhaustive)])
def test_a_run_without_its_storage_ends_as_if_it_had_none(problem: str, s3: int, tmp_path: Path) -> None:
    folder, address = prepared(tmp_path, 1), "s3://no-such-bucket/run"
    with pytest.MonkeyPatch.context() as patch:
        if problem == "no server":
            patch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
        code, output, errors = frugal_train(
            folder, "--plan", "plan1.json", "--data", "text.jsonl", "--steps", 2, "--out", "one", "--mirror", address,
            "--set", "train.grace=2",
        )  # fmt: skip
    assert code == 0 and "model written to" in output
    assert errors.startswith(f"warning: the mirror {address} cannot be used now ("), "before anything is read"
    assert f"warning: the mirror {address} " in errors and "step-000002" in errors
    assert "a-secret-of-the-storage" not in output + errors
