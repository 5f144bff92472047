"""The store that all ranks share, behind the gate: where torch's process groups find out who listens where.

torch's own TCPStore lets in everyone who reaches its port. Who is in may set the addresses that gloo connects to, read
what NCCL's connections are proven by, and delete what others wait for. This one has the same methods on connections
that have proven to know the run's secret; a message is its length in 4 bytes, and msgspec's MessagePack.

Left out: what frugal, gloo, NCCL and DeepSpeed do not use, such as queues.
"""

import queue
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import msgspec
from torch.distributed import DistNetworkError, DistStoreError, Store

from frugal.distributed.connections import handshake
from frugal.distributed.connections.gate import Admit, Gate
from frugal.distributed.connections.handshake import Introduction

PURPOSE = "store"
CONNECTIONS_OF_A_RANK = 2
"""So that one thread is answered while another waits for a key."""

MOST_BYTES = 16 * 2**20
_LENGTH = struct.Struct("!I")
_ANSWER_SECONDS = 300.0
"""Beyond what was asked to be waited, for rank 0's process to come to answer: others hold the interpreter."""


class StoreRequest(msgspec.Struct, array_like=True):
    """A method of the store: its name, the keys, the values if it has some, and for how long keys are waited for."""

    method: str
    keys: list[str] = []
    values: list[bytes] = []
    amount: int = 0
    seconds: float = 0.0


class StoreReply(msgspec.Struct, array_like=True):
    """What a method returns; `is_late` where keys did not come in time."""

    values: list[bytes] = []
    number: int = 0
    is_late: bool = False


def _frame(value: StoreRequest | StoreReply) -> bytes:
    message = msgspec.msgpack.encode(value)
    return _LENGTH.pack(len(message)) + message


def _message_bytes(length: bytes | bytearray) -> int:
    """Return the bytes of a message that begins so.

    Raises:
        ValueError: they are more than may be.
    """
    (number,) = _LENGTH.unpack_from(length)
    if number > MOST_BYTES:
        raise ValueError(f"a message of {number} bytes, where {MOST_BYTES} are the most")
    return int(number)


def _first_message(received: bytearray) -> bytearray | None:
    """Take the first message out of what was received; None: it is not complete yet. Raises as `_message_bytes`."""
    if len(received) < _LENGTH.size or len(received) < (end := _LENGTH.size + _message_bytes(received)):
        return None
    message = received[_LENGTH.size : end]
    del received[:end]
    return message


class StoreServer:
    """Keys and values, on rank 0. All of it runs on the gate's thread."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._received: dict[socket.socket, bytearray] = {}
        self._waiting: dict[socket.socket, tuple[StoreRequest, float]] = {}  # and until when
        self.gate: Gate | None = None

    def admit(self, sock: socket.socket, _introduction: Introduction) -> None:
        """Serve a rank's connection."""
        assert self.gate is not None
        sock.setblocking(False)
        self._received[sock] = bytearray()
        self.gate.selector.register(sock, selectors.EVENT_READ, self._read)

    def look(self) -> None:
        """StoreReply those who wait for keys that are there now, or did not come in time."""
        now = time.monotonic()
        for sock, (request, end) in list(self._waiting.items()):
            if all(key in self._values for key in request.keys):
                self._reply(sock, StoreReply([self._values[key] for key in request.keys]))
            elif now > end:
                self._reply(sock, StoreReply(is_late=True))

    def _read(self, sock: socket.socket) -> None:
        received = self._received.get(sock)
        if received is None:  # forgotten while another was served that was ready at the same time
            return
        try:
            part = sock.recv(2**16)
            received += part
            message = _first_message(received)
            if message is None and part:
                return
            request = msgspec.msgpack.decode(message or b"", type=StoreRequest)
            if request.method in ("get", "wait"):
                self._waiting[sock] = request, time.monotonic() + request.seconds
            else:
                self._reply(sock, self._do(request))
        except BlockingIOError:
            return
        except (OSError, ValueError, IndexError, RecursionError, msgspec.DecodeError):
            self._forget(sock)
        self.look()

    def _do(self, request: StoreRequest) -> StoreReply:
        """What is answered at once."""
        keys, values = request.keys, request.values
        if request.method == "set":
            self._values.update(zip(keys, values, strict=True))
        elif request.method == "append":
            self._values[keys[0]] = self._values.get(keys[0], b"") + values[0]
        elif request.method == "add":
            number = int(self._values.get(keys[0], b"0")) + request.amount
            self._values[keys[0]] = str(number).encode()
            return StoreReply(number=number)
        elif request.method == "compare_set":
            expected, desired = values
            if self._values.get(keys[0], b"") == expected:
                self._values[keys[0]] = desired
            return StoreReply([self._values.get(keys[0], expected)])
        elif request.method == "check":
            return StoreReply(number=int(all(key in self._values for key in keys)))
        elif request.method == "delete":
            return StoreReply(number=int(self._values.pop(keys[0], None) is not None))
        elif request.method == "keys":
            return StoreReply([key.encode() for key in self._values])
        else:
            raise ValueError(request.method)
        return StoreReply()

    def _reply(self, sock: socket.socket, reply: StoreReply) -> None:
        self._waiting.pop(sock, None)
        try:
            sock.settimeout(1.0)  # a rank that asked reads what it asked for
            sock.sendall(_frame(reply))
            sock.setblocking(False)
        except OSError:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        assert self.gate is not None
        self._waiting.pop(sock, None)
        if self._received.pop(sock, None) is not None:
            self.gate.selector.unregister(sock)
            sock.close()


class RankStore(Store):
    """A rank's end: a store for torch, whose methods ask rank 0 over one of the proven `connections`."""

    def __init__(self, connections: Sequence[socket.socket]) -> None:
        super().__init__()
        self._idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for sock in connections:
            self._idle.put(sock)

    def _ask(self, method: str, keys: Sequence[str] = (), values: Sequence[Any] = (), **more: Any) -> StoreReply:
        request = StoreRequest(method, list(keys), [_bytes(value) for value in values], **more)
        end = time.monotonic() + request.seconds + _ANSWER_SECONDS
        sock = self._idle.get()
        try:
            sock.settimeout(_ANSWER_SECONDS)
            sock.sendall(_frame(request))
            number = _message_bytes(handshake.receive(sock, _LENGTH.size, end))
            reply = msgspec.msgpack.decode(handshake.receive(sock, number, end), type=StoreReply)
        except (OSError, ValueError, msgspec.DecodeError) as error:
            sock.close()  # an answer that came now would be taken for that to the next request
            raise DistNetworkError(f"Connection to rank 0's store was lost: {error}") from None
        finally:
            self._idle.put(sock)
        if reply.is_late:
            raise DistStoreError(f"no rank has set {', '.join(keys)} within {request.seconds:.0f} s")
        return reply

    def _timeout(self) -> timedelta:
        """For keys, which torch sets to that of its process group."""
        return self.timeout  # type: ignore[attr-defined]  # torch's stubs lack it

    def clone(self) -> "RankStore":
        """This one: it may be used by many threads."""
        return self

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        self._ask("set", [key], [value])

    def get(self, key: str) -> bytes:
        """A value, which is waited for. Raises as `wait`."""
        return self.multi_get([key])[0]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys.

        Raises:
            DistStoreError: they did not come in time.
            DistNetworkError: rank 0 is gone.
        """
        self._ask("wait", keys, seconds=(timeout or self._timeout()).total_seconds())

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are set. No where rank 0 is gone: NCCL's watch asks on a thread that may not raise."""
        try:
            return bool(self._ask("check", keys).number)
        except DistNetworkError:
            return False

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins at 0; what it is then."""
        return self._ask("add", [key], amount=amount).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set a value where it is what is expected, or nothing is; what it is then."""
        return self._ask("compare_set", [key], [expected, desired]).values[0]

    def delete_key(self, key: str) -> bool:
        """Forget a key; whether it was set."""
        return bool(self._ask("delete", [key]).number)

    def num_keys(self) -> int:
        """How many keys are set."""
        return len(self.list_keys())

    def list_keys(self) -> list[str]:
        """The keys that are set."""
        return [key.decode() for key in self._ask("keys").values]

    def append(self, key: str, value: str | bytes) -> None:
        """Put something behind a value."""
        self._ask("append", [key], [value])

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Values, which are waited for. Raises as `wait`."""
        return self._ask("get", keys, seconds=self._timeout().total_seconds()).values

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Set values."""
        self._ask("set", keys, values)

    def has_extended_api(self) -> bool:
        """Whether there are `append`, `multi_get` and `multi_set`."""
        return True

    deleteKey, getNumKeys, listKeys = delete_key, num_keys, list_keys  # noqa: N815  # as torch calls them from C++


def _bytes(value: str | bytes | Sequence[int]) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def serve(server: socket.socket, secret: bytes, world_size: int, watched: Admit) -> None:
    """Open the gate on rank 0: to connections for the store, and to those for the peer watch, which `watched` gets."""
    store = StoreServer()
    expected = world_size * CONNECTIONS_OF_A_RANK + world_size - 1
    store.gate = Gate(server, secret, world_size, {PURPOSE: store.admit, "watch": watched}, expected)
    store.gate.on_look = store.look
    store.gate.open()
