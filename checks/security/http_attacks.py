"""What a stranger may try on a server that speaks HTTP: SGLang's, or `opd watch`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from checks.security.raw import Door, Outcome, drip, flood, hold, send, send_and_leave

GIGABYTE = 1 << 30
SLOW, SLOW_S = 50, 30.0
MANY = 3000
SLOW_ATTACKS = ("slow-loris", "silent connections", f"{MANY} silent connections")
BODY = b'{"input_ids":[[1,2,3]],"sampling_params":{"max_new_tokens":1,"temperature":1.0}}'


@dataclass(frozen=True)
class Target:
    """Describes a server.

    request: what it answers with 200, given the right headers. wrong: headers that a stranger may
    guess, by name.
    """

    door: Door
    request: tuple[str, str, bytes]
    right: Mapping[str, str]
    wrong: Mapping[str, Mapping[str, str]]

    def head(self, headers: Mapping[str, str], length: int, path: str | None = None) -> bytes:
        """The beginning of `request` with these headers."""
        method, known, _ = self.request
        lines = [f"{method} {path or known} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if length:
            lines += ["Content-Type: application/json", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode("latin-1")

    def whole(self, headers: Mapping[str, str]) -> bytes:
        """`request` with these headers."""
        body = self.request[2]
        return self.head(headers, len(body)) + body

    def answers(self) -> Outcome:
        """What somebody gets who may ask."""
        return send(self.door, self.whole(self.right))


def attacks(target: Target, open_paths: tuple[str, ...]) -> dict[str, Callable[[], Outcome]]:
    """Every attack by name. open_paths: of what the software behind it leaves open by itself."""
    door, whole = target.door, target.whole({})
    found: dict[str, Callable[[], Outcome]] = {"no key": lambda: send(door, whole)}
    for name, headers in target.wrong.items():
        found[name] = lambda headers=headers: send(door, target.whole(headers))
    for path in open_paths:
        method, body = target.request[0], target.request[2]
        head = target.head({}, len(body), path) if method == "POST" else target.head({}, 0, path)
        found[f"{method} {path} without a key"] = lambda head=head, body=body: send(
            door, head + body
        )
    websocket = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    websocket |= {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
    upgrade = f"GET /v1/realtime HTTP/1.1\r\nHost: 127.0.0.1\r\n{_lines(websocket)}\r\n".encode()
    escape = b"GET /\x1b[2J\x1b[31mred HTTP/1.1\r\nHost: 127.0.0.1\r\nX-\x1b[31m: \x07\r\n\r\n"
    return found | {
        "websocket without a key": lambda: send(door, upgrade, 3.0),
        "Host: x/health?": lambda: send(door, whole.replace(b"127.0.0.1", b"x/health?", 1)),
        "garbage": lambda: send(door, os.urandom(1 << 16)),
        "escape codes": lambda: send(door, escape),
        "1 GB body": lambda: flood(door, target.head({}, GIGABYTE), GIGABYTE),
        "1 GB header": lambda: flood(door, b"GET / HTTP/1.1\r\nX: ", GIGABYTE),
        "truncated, left": lambda: send_and_leave(door, whole[: len(whole) // 2]),
        "slow-loris": lambda: drip(door, whole, SLOW, 0.5, SLOW_S),
        "silent connections": lambda: hold(door, SLOW, SLOW_S),
        f"{MANY} silent connections": lambda: hold(door, MANY, SLOW_S),
    }


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
