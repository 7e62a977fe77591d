"""Runs one process and ends its whole tree when told to, or when its owner is gone.

    python -m megatron_opd.launch.guard < ORDERS > EVENTS 2> LOG

Orders are lines: JSON {arguments, env} of what is run, then `stop GRACE_S`. Events are lines of
JSON: {pid} or {error} at its start, {code} once it has ended. Its output goes to the log.

Invariants: no process of the tree is left when the code is reported. The orders end when their
writer does, in whatever way, and that ends the tree too; so does the end of the guard itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal

from megatron_opd.launch.tree import Tree

ORDERS, EVENTS, LOG = 0, 1, 2
OWNER_GONE_GRACE_S = 2.0


class Orders:
    """Reads lines of orders, and notices signals meanwhile."""

    def __init__(self) -> None:
        self._buffer = b""
        self._signals, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(wake)

    def next(self) -> bytes | None:
        """Return an order; empty: there will be none; None: a child has ended."""
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if newline:
                self._buffer = rest
                return line
            ready, _, _ = select.select([ORDERS, self._signals], [], [])
            if ORDERS in ready:
                data = os.read(ORDERS, 65536)
                if not data:
                    return b""
                self._buffer += data
            elif signal.SIGTERM in os.read(self._signals, 4096):
                return b""
            else:
                return None


def tell(**event: object) -> None:
    """Report to the owner, which may be gone."""
    with contextlib.suppress(BrokenPipeError):
        os.write(EVENTS, json.dumps(event).encode() + b"\n")


def main() -> None:
    """Run what is ordered until its end."""
    if os.fork():  # an owner that ends its children as it ends would leave the tree alone
        os._exit(0)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's processes block SIGINT
    orders = Orders()
    first = orders.next()
    if not first:
        return
    try:
        tree = Tree(**json.loads(first), out=LOG)
    except OSError as error:
        tell(error=str(error))
        return
    tell(pid=tree.pid)
    while tree.code is None:
        order = orders.next()
        tree.reap()
        if order is not None:
            tree.end(float(order.split()[1]) if order else OWNER_GONE_GRACE_S)
    tree.end(0)
    tell(code=tree.code)


if __name__ == "__main__":
    main()
