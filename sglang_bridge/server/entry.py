"""Prepares the machine and runs SGLang.

Refuses to start when the plugin did not take hold: SGLang itself would only log that and serve
without it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import threading
import time
from pathlib import Path

from sglang_bridge import freed, open_files
from sglang_bridge.arrivals import Arrivals
from sglang_bridge.lifetime import signal_at_end_of_parent
from sglang_bridge.refusals import Refusals
from sglang_bridge.server import files, plain_weights, unneeded_models, workers
from sglang_bridge.server.spec import (
    API_KEY_VARIABLE,
    ENABLED_VARIABLE,
    FILES_VARIABLE,
    MEMORY_FLAGS,
    NONCE_VARIABLE,
    PARENT_VARIABLE,
)

MODULE = "sglang_bridge.server"
STANDINS = Path(__file__).parent / "standins"
DETERMINISTIC_FLAG, CHUNK_OPTION = "--enable-deterministic-inference", "--chunked-prefill-size"
POOL_OPTION = "--max-total-tokens"
# What makes a token's arithmetic depend on what arrives beside its request, where attention is
# torch's: it rounds by where a prompt is cut, and a prefill otherwise than a decode step.
CPU_UNDOES_DETERMINISM = {
    CHUNK_OPTION: "where a prompt is cut would depend on what arrives beside it",
    "--enable-mixed-chunk": "what a decode step computes would depend on what arrives beside it",
    "--speculative-algorithm": "what is drafted depends on what is computed beside it",
}
CPU_ARGUMENTS = {
    "--device": "cpu",
    "--attention-backend": "torch_native",
    "--sampling-backend": "pytorch",
    # SGLang sizes the pool from all free memory, which on a shared machine is everybody's.
    POOL_OPTION: "65536",
}
# An idle scheduler spins on its sockets otherwise: a whole core for each server, taken from others.
CPU_FLAGS = ("--sleep-on-idle",)
EXIT_INTERRUPTED = 130
GPU_FLAGS = ("--enable-fp32-lm-head", "--disable-shared-experts-fusion")
NEVER_IMPORTED = ("megatron",)
"""Packages that SGLang imports where they are installed, and no server needs: its debug dumper
looks for Megatron's parallel state, which costs half of a start's processor time."""


def end_with_parent(parent: int, own_files: str | None = None, poll_s: float = 0.5) -> None:
    """Kills this process group once `parent` is no longer our parent, and removes `own_files`.

    The workers end first, because their open files are removed too, and this process last.
    Polled, and not killed by the kernel, which looks at the parent's *thread*, not its process.
    What the kernel sends lets a server that is stopped go on, to see that its parent is gone.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(poll_s)
        pids = workers.process_group(os.getpgid(0))
        workers.kill_below()
        files.remove(own_files, pids)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    if os.getpgid(0) != os.getpid():
        raise RuntimeError(f"{PARENT_VARIABLE} is set but this process does not lead its group")
    if sys.platform.startswith("linux"):
        signal_at_end_of_parent(signal.SIGCONT)
    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def offer_standins() -> None:
    """Puts the stand-in torchvision on the path, for this process and its children."""
    if str(STANDINS) not in sys.path:
        if importlib.util.find_spec("torchvision") is not None:
            return
        sys.path.append(str(STANDINS))
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [inherited, str(STANDINS)]))


def value_of(option: str, arguments: list[str]) -> str | None:
    """Returns the last value given for an option, as `--option value` or `--option=value`."""
    found = None
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, joined, value = argument.partition("=")
        if name == option:
            found = value if joined else following
    return found


def arguments_for_device(
    arguments: list[str], *, cuda: bool, has_delta_nets: bool = False, has_sinks: bool = False
) -> list[str]:
    """Returns `arguments` with what the device demands; whatever the user gave stays.

    has_delta_nets: whether the model has layers whose state is no KV cache. has_sinks: whether its
    attention has sinks. Raises ValueError for what cannot be deterministic.
    """
    if not cuda:  # torch_memory_saver is for CUDA alone: there is nothing to give up here
        arguments = [argument for argument in arguments if argument not in MEMORY_FLAGS]
    given = {argument.partition("=")[0] for argument in arguments}
    flags = [flag for flag in (GPU_FLAGS if cuda else CPU_FLAGS) if flag not in given]
    values = {} if cuda else dict(CPU_ARGUMENTS)
    if has_delta_nets and not cuda:
        from sglang_bridge.server.compat import delta_net

        flags += [flag for flag in delta_net.FLAGS if flag not in given]
        values |= delta_net.ARGUMENTS
    if has_sinks and not cuda:
        from sglang_bridge.server.compat import sinks

        needed = (*sinks.FLAGS, *(sinks.DETERMINISTIC_FLAGS if DETERMINISTIC_FLAG in given else ()))
        flags += [flag for flag in needed if flag not in given]
        values |= sinks.ARGUMENTS
    if DETERMINISTIC_FLAG in given and not cuda:
        for option, reason in CPU_UNDOES_DETERMINISM.items():
            if option in given:
                raise ValueError(
                    f"{option} must be left out with {DETERMINISTIC_FLAG} on a CPU: {reason}"
                )
        # Prompts are computed whole: a batch of them is never larger than the KV pool. (Chunking
        # turned off would leave SGLang's buffer of routed experts too small.)
        values[CHUNK_OPTION] = value_of(POOL_OPTION, arguments) or values[POOL_OPTION]
    missing = ((name, value) for name, value in values.items() if name not in given)
    return [*arguments, *flags, *(word for pair in missing for word in pair)]


def preload() -> None:
    """Imports all that a server imports on a CPU, whatever its model. SystemExit: there is CUDA."""
    import torch

    if torch.cuda.is_available():
        sys.exit("nothing is preloaded where CUDA is: no fork survives it")
    os.environ[ENABLED_VARIABLE] = "1"
    freed.give_back_freed()
    offer_standins()
    from sglang_bridge.server import auth, connections, front, gates, owner, starting  # noqa: F401
    from sglang_bridge.server.compat import startup

    startup.preload()


def main() -> None:
    """Runs the server until it is told to stop."""
    model = value_of("--model-path", sys.argv[1:])
    if model is not None and Path(model).is_absolute() and not Path(model).exists():
        # SGLang finds out once it has imported everything, and says it in a traceback
        sys.exit(f"error: --model-path must be a checkpoint's directory, {model} does not exist")
    # a scheduler may send it to every process of a job; whoever started this server answers it
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    parent = os.environ.pop(PARENT_VARIABLE, None)
    api_key = os.environ.pop(API_KEY_VARIABLE, None)  # no child needs it
    nonce = os.environ.pop(NONCE_VARIABLE, None)
    # a server started by hand removes its files itself
    own_files = os.environ.pop(FILES_VARIABLE, None) or files.make()
    if parent is not None:
        end_with_parent(int(parent), own_files)
    os.environ[ENABLED_VARIABLE] = "1"
    open_files.raise_limit()
    workers.end_with_workers(own_files, owned=parent is not None)
    import torch

    cuda = torch.cuda.is_available()
    if not cuda:
        freed.give_back_freed()
        offer_standins()
    from sglang_bridge.server import auth, connections, gates, owner, starting
    from sglang_bridge.server.compat import delta_net, hooks, sinks, startup

    hooks.require_supported_version()
    if model is not None and (names := unneeded_models.unneeded(Path(model), sys.argv[1:])):
        os.environ.setdefault(unneeded_models.VARIABLE, ",".join(names))
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    hooks.require_hooks_in_place(hooks.wanted(cuda=cuda, gates=gates.kept()))
    owner.add_owner_routes(nonce)
    starting.guard_start()
    startup.hide_keys()
    startup.keep_files_in(own_files)
    if not cuda:
        startup.fork_workers()
    has_delta_nets = model is not None and delta_net.is_needed(Path(model))
    if has_delta_nets and not cuda:
        os.environ.update(delta_net.ENVIRONMENT)
    has_sinks = model is not None and sinks.is_needed(Path(model))
    arguments = arguments_for_device(
        sys.argv[1:], cuda=cuda, has_delta_nets=has_delta_nets, has_sinks=has_sinks
    )
    if model is not None:
        arguments = plain_weights.as_plain(arguments, Path(model), cuda=cuda)
    server_args = prepare_server_args(arguments)
    refusals = Refusals(auth.logger, "by this server")
    connections.guard_connections(Arrivals(refusals), asks_key=api_key is not None)
    if api_key is not None:
        server_args.api_key = api_key
        auth.guard_requests(api_key, refusals)
    try:
        run_server(server_args)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        group = workers.descendants(os.getpid())
        kill_process_tree(os.getpid(), include_parent=False)
        if parent is None:
            files.remove(own_files, group)
