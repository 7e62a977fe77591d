"""Loads checkpoints with SGLang's own loader, as one rank of a server does, and says what it found.

`python -m tests.support.loading_job RANK TP EP PORT`, one JSON list of [directory, format or null]
on standard input; one JSON object a line for each: {refused, unread, params}.
"""

import json
import logging
import os
import sys
from typing import Any

from sglang_bridge.server.entry import arguments_for_device, offer_standins
from sglang_bridge.server.spec import ENABLED_VARIABLE


class Heard(logging.Handler):
    """Keeps the warnings of sglang_bridge/server/loaded.py."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def start(rank: int, tp: int, ep: int, port: int, model: str) -> None:
    """Makes this process a rank of a server, up to where it would load its model."""
    os.environ |= {"OMP_NUM_THREADS": "1", "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * tp)}
    os.environ[ENABLED_VARIABLE] = "1"
    offer_standins()
    from sglang.srt.distributed import bootstrap
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    words = ["--model-path", model, "--dtype", "float32", "--skip-tokenizer-init"]
    words += ["--tp-size", str(tp), "--ep-size", str(ep)]
    arguments = prepare_server_args(arguments_for_device(words, cuda=False))
    world = spawn_world_rank(arguments, tp_rank=rank, pp_rank=0)
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=world, gpu_id=rank))
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)


def load(directory: str, format: str | None, heard: Heard) -> dict[str, Any]:
    """Loads one checkpoint as a server of this `quantization` does."""
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed import bootstrap
    from sglang.srt.model_loader import get_model

    from sglang_bridge.server import loaded
    from sglang_bridge.server.spec import QUANTIZATION_VARIABLE

    os.environ.pop(QUANTIZATION_VARIABLE, None)
    if format is not None:
        os.environ[QUANTIZATION_VARIABLE] = format
    heard.texts.clear()
    config = ModelConfig(directory, dtype="float32")
    bootstrap.init_layer_runtime(model_config=config)
    try:
        model = get_model(
            model_config=config, load_config=LoadConfig(), device_config=DeviceConfig("cpu")
        )
    except loaded.Incomplete as error:
        return {"refused": str(error), "unread": heard.texts[:]}
    total = sum(float(p.double().sum()) for p in model.parameters())
    return {"refused": None, "unread": heard.texts[:], "total": total}


def main() -> None:
    rank, tp, ep, port = map(int, sys.argv[1:5])
    cases = json.load(sys.stdin)
    start(rank, tp, ep, port, cases[0][0])
    from sglang_bridge.server import loaded

    heard = Heard()
    loaded.logger.addHandler(heard)
    for directory, format in cases:
        sys.stdout.write("FOUND " + json.dumps(load(directory, format, heard)) + "\n")
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
