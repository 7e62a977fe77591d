"""The bytes of an HTTP answer -> decoded JSON, over a socket of this process."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import msgspec

from checks.fuzz.engine import Target
from checks.fuzz.mutations import damaged_bytes, one_of
from sglang_bridge.errors import BridgeError
from sglang_bridge.http import HttpConnection

MAX_BYTES = 4096
# A reader may take a bare LF for the end of a line (RFC 9112, 2.2).
BLANK, LINE_END = re.compile(rb"\r?\n\r?\n"), re.compile(rb"\r?\n")
# An answer that lacks its end is cut by the server's end, so this wait is for nobody.
TIMEOUT_S = 5.0


@dataclass
class Peer:
    """A server that answers every request with `answer` and hangs up."""

    loop: asyncio.AbstractEventLoop
    port: int = 0
    answer: bytes = b""

    async def start(self) -> None:
        """Listen."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]

    async def ask(self) -> Any:
        """One request through the border."""
        connection = HttpConnection(f"http://127.0.0.1:{self.port}", timeout_s=TIMEOUT_S)
        try:
            return await connection.request("POST", "/generate", {"a": 1}, max_bytes=MAX_BYTES)
        finally:
            await connection.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.answer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client hung up first
        finally:
            writer.close()


@cache
def peer() -> Peer:
    """One a process."""
    found = Peer(asyncio.new_event_loop())
    found.loop.run_until_complete(found.start())
    return found


def call(answer: bytes) -> Any:
    """What the bridge makes of it."""
    found = peer()
    found.answer = answer
    return found.loop.run_until_complete(found.ask())


def oracle(answer: bytes, found: Any) -> str | None:
    """Only a whole body of a 200 is believed, as a reader of the standard would take it."""
    if found is None:
        return None  # no JSON: whoever asked refuses it
    head, _, rest = _parted(BLANK, answer)
    lines = [line.rstrip(b"\r") for line in head.split(b"\n")]
    if lines[0].split()[1:2] != [b"200"]:
        return "an answer that is no 200"
    names = [line.split(b":", 1)[0].strip().lower() for line in lines[1:]]
    values = [line.split(b":", 1)[-1].strip() for line in lines[1:]]
    headers = dict(zip(names, values, strict=True))
    if headers.get(b"content-encoding", b"identity") != b"identity":
        return "an encoded body"
    if b"chunked" in headers.get(b"transfer-encoding", b"").lower():
        body = _dechunked(rest)
    elif b"content-length" in headers:
        length = headers[b"content-length"]
        body = rest[: int(length)] if length.isdigit() and int(length) <= len(rest) else None
    else:
        body = rest
    if body is None:
        return "a body that is not whole"
    if len(body) > MAX_BYTES:
        return "a body beyond the limit"
    try:
        return None if msgspec.json.decode(body) == found else "another body"
    except (msgspec.MsgspecError, ValueError):
        return "a body that is no JSON"


def _dechunked(rest: bytes) -> bytes | None:
    """The body by RFC 9112; None: it is cut or malformed."""
    body = b""
    while True:
        line, end, rest = _parted(LINE_END, rest)
        size = line.partition(b";")[0].strip()
        try:
            count = int(size, 16) if end and size.isalnum() else -1
        except ValueError:
            count = -1
        if count < 0:
            return None
        if count == 0:
            return body
        after = LINE_END.match(rest, count)
        if after is None:
            return None
        body, rest = body + rest[:count], rest[after.end() :]


def _parted(by: re.Pattern[bytes], text: bytes) -> tuple[bytes, bytes, bytes]:
    found = by.search(text)
    if found is None:
        return text, b"", b""
    return text[: found.start()], found.group(), text[found.end() :]


BODY = json.dumps({"output_ids": [1, 2, 3], "meta_info": {"id": "r"}, "text": "x" * 40}).encode()
TYPE = b"Content-Type: application/json\r\n"


def answered(status: bytes, headers: bytes, body: bytes) -> bytes:
    """An answer from its parts."""
    return b"HTTP/1.1 " + status + b"\r\n" + TYPE + headers + b"\r\n" + body


def chunked(*sizes: int) -> bytes:
    """BODY in chunks."""
    out, rest = b"", BODY
    for size in (*sizes, len(BODY)):
        part, rest = rest[:size], rest[size:]
        out += b"%x\r\n%s\r\n" % (len(part), part) if part else b""
    return answered(b"200 OK", b"Transfer-Encoding: chunked\r\n", out + b"0\r\n\r\n")


LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CORPUS = (
    *(answered(b"200 OK", LENGTH, BODY), answered(b"200 OK", b"", BODY), chunked(), chunked(3, 20)),
    answered(b"500 Internal", LENGTH, BODY),
    answered(b"302 Found", b"Location: http://127.0.0.1:1/\r\nContent-Length: 0\r\n", b""),
    answered(b"200 OK", b"Content-Encoding: gzip\r\n" + LENGTH, BODY),
)
STATUS = (b"200 OK", b"200", b"204 No", b"100 Continue", b"206 Part", b"301 x", b"401 x", b"999 x")
HEADERS = (
    *(LENGTH, b"Content-Length: 99999999999999999999\r\n", b"Content-Length: -1\r\n"),
    *(b"Content-Length: 5\r\n", b"Content-Length: 0x10\r\n", b"Transfer-Encoding: chunked\r\n"),
    *(b"Content-Encoding: br\r\n", b"Content-Encoding: deflate\r\n", b"Connection: upgrade\r\n"),
    *(b"Location: //x\x1b[2J\r\n", b"X: " + b"a" * 9000 + b"\r\n", b"X: \xff\r\n", b": \r\n"),
    *(b"Set-Cookie: a=b\r\n", b"X: a\r\n folded\r\n", b"Content-Type: text/html\r\n", b"\r"),
)
BODIES = (
    *(BODY, b"", b"{}", b"[" * 3000, b"9" * 4000, BODY * 60, b"\x1f\x8b\x08\0", b"NaN", b"\xff"),
    *(b"5\r\n[1,2]\r\n0\r\n\r\n", b"fffffffffffffffff\r\nx", b"5;a=b\r\n[1,2]\r\n0\r\n\r\n"),
    *(
        b"-5\r\n[1]\r\n0\r\n\r\n",
        b"5\r\n[1,2]0\r\n\r\n",
        b"5\r\n[1,2]\r\n",
        b'{"error": "\\u001b[2J"}',
    ),
)


def assembled(rng: Random) -> bytes:
    """Parts that may not fit each other."""
    headers = b"".join(rng.choices(HEADERS, k=rng.randint(0, 3)))
    return answered(rng.choice((b"200 OK", rng.choice(STATUS))), headers, rng.choice(BODIES))


BYTES = damaged_bytes(CORPUS)
TARGET = Target(
    "bridge_http", one_of(BYTES, BYTES, assembled), call, (BridgeError,), oracle, share=1
)
