"""Plays any environment of the `verifiers` package (0.4) with the student of a run.

`environment.function` of run.yaml names it; the Python of `environment.interpreter` has the
package. A row's answer is the number of the task in its task set (rows.py writes such rows).
"""

from __future__ import annotations

import os
import sys
from itertools import islice
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    # where verifiers looks for environments by their names, in this process and in those of tools
    sys.path.append(HERE)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), HERE)))

import in_process  # noqa: E402, F401
import verifiers.v1 as vf  # noqa: E402
from verifiers.v1.configs.agent import AgentConfig  # noqa: E402
from verifiers.v1.utils.loaders import (  # noqa: E402
    env_config_type,
    load_environment,
    resolve_env_config,
)

KEY = "OPD_TRAJECTORY_KEY"
"""Variable in which verifiers finds the key of the endpoint."""
SEAT: dict[str, Any] = {"harness": {"id": "in_process"}, "runtime": {"type": "subprocess"}}


def environment_of(settings: dict[str, Any]) -> vf.Env:
    """Return an environment. settings: its configuration, as a TOML file of verifiers has it.

    Who plays in it does so in this process where they do not say otherwise.
    """
    settings = dict(settings)
    kind = env_config_type(settings["taskset"]["id"], settings.get("id", ""))
    for name, field in kind.model_fields.items():
        if isinstance(field.default, AgentConfig):
            settings[name] = SEAT | settings.get(name, {})
    return load_environment(resolve_env_config(settings))


async def run(
    base_url: str, api_key: str, row: dict[str, Any], *, environment: dict[str, Any]
) -> float:
    """Play one task; return the reward of its first trace. RuntimeError: it has failed."""
    os.environ[KEY] = api_key
    env = environment_of(environment)
    task = next(islice(env.taskset, int(row["answer"]), None))
    student = vf.ModelContext(
        model="student", client=vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
    )
    async with env.serving():
        episode = await env.run_episode(task, student)
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.traces:
        raise RuntimeError(f"{errors[0].type}: {errors[0].message}" if errors else "nobody played")
    return episode.traces[0].reward
