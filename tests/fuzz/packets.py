"""Whatever may come to a port: random bytes, messages of many protocols, and messages that are broken on purpose."""

import json
import pickle
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

from tests.fuzz.hostile import VALUES

MOST_HELD = 64
"""Connections that are left open, so that each packet is not all that a port has to deal with."""


def packets(number: int, *, seed: int = 0) -> Iterator[bytes]:
    """`number` of them: a third random, a third structured, a third structured and then changed."""
    chosen = random.Random(seed)
    for index in range(number):
        if index % 3 == 0:
            yield chosen.randbytes(int(2 ** chosen.uniform(0, 12)))
            continue
        packet = bytearray(_structured(chosen))
        for _ in range(chosen.choice((1, 2, 5)) if index % 3 == 2 else 0):
            place = chosen.randrange(len(packet) + 1)
            match chosen.randrange(4):
                case 0:
                    del packet[place:]
                case 1:
                    packet[place:place] = chosen.choice(
                        (b"\x00", b"\xff" * 4, b"[" * 1000, bytes(chosen.randrange(300)))
                    )
                case 2 if place < len(packet):
                    packet[place] ^= 1 << chosen.randrange(8)
                case _:
                    packet[place:place] = packet[:place]
        yield bytes(packet)


def _structured(chosen: random.Random) -> bytes:
    """A message of a store, of gloo, of a rank that introduces itself, of the web, or a document that is nested."""
    key, value = b"frugal/verdict", chosen.randbytes(chosen.randrange(40))
    deep = chosen.choice((900, 1000, 1005, 1010, 1100, 60_000))
    message = chosen.choice((
        b"\x91" * deep + b"\x90",  # MessagePack: lists in lists, also as the element that is one too many
        b"\x96\xa1w\x01\xa1h\xc4\x00\xc4\x00" + b"\x91" * deep + b"\x90",
        b"\x95\xa3set\x91\xae" + key + b"\x91\xc4" + bytes([len(value)]) + value + b"\x00\x00",
        b"\x81\xa1a" * deep + b"\xc0",
        b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"[" * deep, b'{"a":' * deep, json.dumps(chosen.choice(VALUES)).encode(),
        pickle.dumps(chosen.choice(VALUES)),
    ))  # fmt: skip
    match chosen.randrange(6):
        case 0:
            return struct.pack("!I", len(message)) + message
        case 1:
            return (
                struct.pack(chosen.choice(("!I", "<I", "!Q", "<Q")), chosen.choice((0, 1, 2**31, 2**32 - 1))) + message
            )
        case 2:  # an introduction
            return struct.pack("!I", chosen.choice((0, 1, 2, 2**32 - 1))) + chosen.randbytes(64)
        case 3:  # torch's TCPStore: its magic number, then commands
            commands = (_command(chosen, key, value) for _ in range(chosen.randrange(1, 6)))
            return b"\x00" + struct.pack("=I", 0x3C85F7CE) + b"".join(commands)
        case 4:  # gloo's number of a pair
            return struct.pack("=q", chosen.choice((-1, 2**40, chosen.randrange(2**63)))) + value
        case _:
            return chosen.choice((b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-x\r\n", b"\x16\x03\x01\x02\x00\x01", message))


def _command(chosen: random.Random, key: bytes, value: bytes) -> bytes:
    """Return a command of TCPStore, whose lengths and counts are sometimes wrong."""

    def text(content: bytes) -> bytes:
        wrong = (0, 16, 2**31, 2**33, 2**63, 2**64 - 1)
        return struct.pack("=Q", len(content) if chosen.random() < 0.9 else chosen.choice(wrong)) + content

    count = struct.pack("=Q", chosen.choice((0, 1, 2, 2**32, 2**64 - 1)))
    key = chosen.choice((key, b"init", value))
    arguments = (
        text(key), text(key) + text(value), text(key) + text(value) + text(b"x"),
        text(key) + struct.pack("=q", chosen.choice((1, -1, 2**62))), count + text(key),
        count + text(key) + text(value), b"",
    )  # fmt: skip
    return bytes([chosen.randrange(24)]) + chosen.choice(arguments)


def attack(port: int, number: int, *, seed: int = 0) -> int:
    """Send `number` packets to a port of this host, each over a connection of its own; how many it took.

    Returns early where nothing listens there any more, or what listens takes no connection.
    """
    chosen, held, taken = random.Random(seed), [], 0
    for packet in packets(number, seed=seed):
        source = (f"127.{chosen.randrange(2, 250)}.{chosen.randrange(250)}.1", 0)
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=30, source_address=source)
        except OSError:
            break
        taken += 1
        with suppress(OSError):
            sock.sendall(packet)
            match chosen.randrange(4):
                case 0:
                    sock.shutdown(socket.SHUT_WR)
                case 1:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets it
                    sock.close()
                case 2:
                    held.append(sock)
                    continue
        sock.close()
        while len(held) > MOST_HELD:
            held.pop(0).close()
    for sock in held:
        sock.close()
    return taken
