"""The helper that other tests trust to see open doors."""

import os
import socket

from tests.support.sockets import listening, open_to_others


def test_the_list_of_listeners_sees_open_doors():
    """The helper that other tests trust finds a socket on every interface, and a closed one not."""
    with socket.socket() as wide, socket.socket() as narrow:
        wide.bind(("0.0.0.0", 0))
        narrow.bind(("127.0.0.1", 0))
        for listener in (wide, narrow):
            listener.listen()
        ports = {port: ip for ip, port, _ in listening(os.getpid())}
        assert ports[wide.getsockname()[1]] == "0.0.0.0"
        assert ports[narrow.getsockname()[1]] == "127.0.0.1"
        found = [port for _, port, _ in open_to_others(os.getpid())]
        assert wide.getsockname()[1] in found
        assert narrow.getsockname()[1] not in found
