"""A hub that accepts and says nothing, or not all: it is given up, with a message that says so."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

HEAD = b'HTTP/1.1 200 OK\r\nContent-Length: 2000\r\nETag: "a"\r\n\r\n'


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The hub's client with a patience of 0.6 s."""
    from huggingface_hub import constants, get_session, set_client_factory

    from frugal.models import factories

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    usual = get_session()
    kind, hooks = type(usual), usual.event_hooks
    factories._limit_patience.__wrapped__()
    yield
    factories._silent.clear()
    set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True, timeout=None))


def serve(said: bytes) -> str:
    """The address of a server that says this and then nothing."""
    listening = socket.create_server(("127.0.0.1", 0))

    def talk() -> None:
        with suppress(OSError):
            connection, _ = listening.accept()
            connection.recv(1 << 16)
            connection.sendall(said)
            threading.Event().wait(60)

    threading.Thread(target=talk, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("said", [b"", HEAD + b"x"], ids=["silent", "a part of a body"])
@pytest.mark.usefixtures("patient")
def test_a_hub_that_never_ends_its_answer_is_given_up_and_not_asked_again(said: bytes) -> None:
    from huggingface_hub import get_session
    from huggingface_hub.errors import OfflineModeIsEnabled

    from frugal.models import factories

    slow = serve(said)
    for _ in range(2):
        with pytest.raises(OfflineModeIsEnabled) as raised:
            get_session().get(f"{slow}/api/models/a", timeout=None)
        assert "127.0.0.1 does not answer within 1 s" in str(raised.value)
    assert "; HF_HUB_DOWNLOAD_TIMEOUT=1 waits longer)" in factories.why_hub_failed(raised.value)


@pytest.mark.usefixtures("patient")
def test_a_hub_that_answers_is_read() -> None:
    from huggingface_hub import get_session

    answer = get_session().get(f"{serve(HEAD + b'x' * 2000)}/file", timeout=None)
    assert answer.content == b"x" * 2000
    with get_session().stream("GET", f"{serve(HEAD + b'y' * 2000)}/file") as answer:
        assert b"".join(answer.iter_bytes()) == b"y" * 2000
