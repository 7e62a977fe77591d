"""A server that SGLang's own command starts, with a wheel of the bridge in front of its path."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_bridge.errors import BridgeError
from sglang_bridge.http import HttpConnection
from sglang_bridge.ports import free_port
from sglang_bridge.server.launch import signal_group
from sglang_bridge.server.spec import ENABLED_VARIABLE

STARTUP_TIMEOUT_S = 240.0
# as docs/scorer.md has it for a plain CPU
COMMAND = """-m sglang.launch_server --device cpu --attention-backend torch_native
  --sampling-backend pytorch --max-total-tokens 16384 --mem-fraction-static 0.3 --dtype float32
  --sleep-on-idle --skip-server-warmup"""


async def is_up(url: str, key: str) -> bool:
    http = HttpConnection(url, timeout_s=5, api_key=key)
    try:
        await http.get("/v1/models")
    except BridgeError:
        return False
    finally:
        await http.close()
    return True


@contextmanager
def stock_server(site: Path, model: Path, key: str, scratch: Path) -> Iterator[str]:
    """Its url. site: the unpacked wheel."""
    port, log = free_port(), scratch / "server.log"
    words = ["--model-path", str(model), "--port", str(port), "--api-key", key]
    path = [site, site / "sglang_bridge" / "server" / "standins"]
    env = {
        **os.environ,
        ENABLED_VARIABLE: "1",
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, *COMMAND.split(), *words],
            env=env,
            cwd=scratch,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url, until_s = f"http://127.0.0.1:{port}", time.monotonic() + STARTUP_TIMEOUT_S
        while not asyncio.run(is_up(url, key)):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < until_s, log.read_text()[-3000:]
            time.sleep(0.3)
        yield url
    finally:
        signal_group(process.pid, 9)
        process.wait()
