"""Turns the configuration into the SGLang servers of one machine."""

from __future__ import annotations

from pathlib import Path

from megatron_opd.checkpoint.hf_formats import require_known
from megatron_opd.config.roles import STUDENT, Role, followers, gets_weights, section_of
from megatron_opd.config.schema import Config
from megatron_opd.config.servers import ServerConfig
from megatron_opd.errors import UserError
from megatron_opd.inputs.extra_args import check_extra_args, check_stops
from megatron_opd.inputs.model_facts import read_model, read_teacher
from megatron_opd.inputs.weights import check_weights, served_tensors
from megatron_opd.launch.gpus import has_gpu
from megatron_opd.launch.placement import UNPLACED, Placement
from megatron_opd.launch.placing import gpus_of_server
from megatron_opd.models.shared_ids import num_shared_ids
from sglang_bridge.errors import PortInUse
from sglang_bridge.listening import require_interface
from sglang_bridge.ports import free_port
from sglang_bridge.server.entry import arguments_for_device
from sglang_bridge.server.launch import ServerProcess, check_port
from sglang_bridge.server.spec import ServerSpec, server_command


def make_spec(
    config: Config,
    role: Role,
    port: int,
    index: int,
    model: Path,
    gpus: tuple[str, ...] | None = None,
) -> ServerSpec:
    """Return what server `index` of a role is started with; each server has a seed of its own.

    gpus: what CUDA calls those that it sees; None: those that this process sees. Raises UserError
    when extra_args contradict the configuration.
    """
    section = section_of(config, role)
    spec = ServerSpec(
        model_path=str(model),
        role="student" if role == STUDENT else "teacher",
        port=port,
        host=section.host,
        dtype=section.dtype,
        tp=section.tp,
        ep=section.ep,
        context_length=section.context_length,
        max_total_tokens=section.max_total_tokens,
        max_running_requests=section.max_running_requests,
        mem_fraction_static=section.mem_fraction_static,
        seed=config.run.seed + index,
        threads=section.threads,
        group_timeout_s=config.weight_sync.try_s,
        routed_experts=role == STUDENT and config.learner.replays_experts,
        routed_gates=role == STUDENT and config.learner.replays_gates,
        deterministic=config.run.deterministic,
        quantization=section.quantization,
        weights_dir=_weights_dir(config, role),
        shares_memory=role == STUDENT and config.schedule.time_shared,
        follows=role in followers(config),
        gpus=gpus,
        interface=config.cluster.interface,
        num_ids=num_shared_ids(config) if gets_weights(config, role) else None,
        model_key=f"{role}.model",
        extra_args=section.extra_args,
    )
    if spec.interface is not None:
        _check_interface(spec.interface)
    check_extra_args(section, role)
    if role == STUDENT:
        check_stops(config)
    _check_for_device(spec, role)
    if not has_gpu():
        _check_format(model, f"{role}.model")
    return spec


def _weights_dir(config: Config, role: Role) -> str | None:
    """Return the directory below which a server of this role may read new weights."""
    directory = config.weight_sync.directory
    return str(directory.absolute()) if directory is not None and role == STUDENT else None


def _check_interface(name: str) -> None:
    try:
        require_interface(name)
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_for_device(spec: ServerSpec, role: Role) -> None:
    """Raise UserError for options that this machine's device does not support."""
    if spec.quantization is not None and spec.dtype == "float32" and has_gpu():
        raise UserError(
            f"{role}.dtype must be bfloat16 with {role}.quantization on a GPU, whose kernels take "
            "no float32, got float32"
        )
    try:
        arguments_for_device(server_command(spec), cuda=has_gpu())
    except ValueError as error:
        asked = " (run.deterministic is true)" if spec.deterministic else ""
        raise UserError(f"{role}.extra_args: {error}{asked}") from None


def _check_format(model: Path, key: str) -> None:
    """Raise UserError for a format of quantised matrices that no server on a CPU holds."""
    try:
        require_known(model)
    except ValueError as error:
        raise UserError(f"{key}: {error}") from None


def server_spec(config: Config, role: Role, index: int) -> ServerSpec:
    """Return server `index` of a role on its configured port and GPUs. Raises UserError."""
    section = section_of(config, role)
    key = f"{role}.model"
    if role == STUDENT:
        check_weights(section.model, key, read_model(section.model, key).spec)
    else:
        served_tensors(section.model, key, read_teacher(config, role).raw)
    port = section.base_port + index
    require_free(section.host, port, f"{role}.base_port")
    gpus = gpus_of_server(config, role, index)
    return make_spec(config, role, port, index, section.model, gpus)


def server_processes(
    config: Config,
    role: Role,
    logs: Path,
    api_key: str | None = None,
    placement: Placement = UNPLACED,
) -> list[ServerProcess]:
    """Return the role's servers of this machine, not started; none when its urls name others."""
    section = section_of(config, role)
    if section.urls:
        return []
    return [
        ServerProcess(
            make_spec(config, role, port, index, section.model, placement.visible(role, index)),
            logs / f"{log_name(role)}-{index}.log",
            api_key,
            f"{role}.base_port",
        )
        for index, port in enumerate(server_ports(section, role))
    ]


def log_name(role: Role) -> str:
    """Return the prefix of the log names of a role's servers: student, teacher, teacher-NAME."""
    return role.replace("teachers.", "teacher-")


def server_ports(section: ServerConfig, key: str) -> list[int]:
    """Return the port of each server of a role; a fixed port in use is a UserError."""
    if section.base_port == 0:
        try:
            return [free_port(section.host) for _ in range(section.servers)]
        except OSError as error:
            raise UserError(
                f"{key}.host must be an address of this machine, got {section.host!r}: "
                f"{error.strerror}"
            ) from None
    ports = [section.base_port + i for i in range(section.servers)]
    for port in ports:
        require_free(section.host, port, f"{key}.base_port")
    return ports


def require_free(host: str, port: int, key: str) -> None:
    """Raise UserError when `port` cannot be bound on `host`."""
    try:
        check_port(host, port, key)
    except PortInUse as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{key}: cannot listen on {host}:{port}: {error.strerror}") from None


def check_addresses(config: Config, *, learner_here: bool) -> None:
    """Check that the addresses to listen on exist on this machine and are free.

    learner_here: the learner's rank 0, which listens for the servers, runs on this machine.
    """
    learner = config.learner
    require_free(learner.listen_host, learner.listen_port, "learner.listen_host, listen_port")
    if learner_here:
        require_free(config.weight_sync.host, 0, "weight_sync.host")
    if config.sites.members:
        require_free(config.sites.host, config.sites.port, "sites.host, port")
