"""Defines the section that says how a run uses a Ray cluster."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from megatron_opd.config.section import FilePath, Section, Text, is_host
from megatron_opd.config.servers import is_server_url
from megatron_opd.config.wording import shown


class RayConfig(Section):
    """Says which Ray cluster a run uses, and what it takes there; read with cluster.type: ray."""

    address: Text = "auto"
    """HOST:PORT of the cluster's head. auto: the RAY_ADDRESS of the environment, which a Ray job
    has, or the cluster that this machine belongs to. The machine must belong to it in any case:
    from elsewhere, see submit."""
    cpus: Annotated[float, Field(gt=0, le=1024)] = 0.5
    """CPUs that Ray sets aside for each server and for each node of the learner, besides their
    GPUs. Ray only counts them, and other work is placed by what is left. Raising it keeps others
    from these nodes; more than a node has left makes the run wait."""
    autoscaling: bool = False
    """Says that the cluster adds nodes when they are missing. false: what its present nodes could
    never hold is an error at once; true: the run waits for it."""
    submit: Text | None = None
    """Address of the cluster's dashboard, http://HOST:8265: `opd run` then runs as a job in the
    cluster instead of here, prints its output here, stops it on Ctrl-C and ends with its exit code.
    null: `opd run` runs here."""
    directory: FilePath | None = None
    """Directory on the cluster's machines in which a submitted job runs, where relative paths of
    the configuration begin. null: where Ray starts jobs."""

    @field_validator("address")
    @classmethod
    def _is_a_head(cls, address: str) -> str:
        host, _, port = address.rpartition(":")
        if address != "auto" and not (is_host(host) and port.isdecimal() and int(port) < 65536):
            raise ValueError(
                f"must be auto or HOST:PORT of a Ray cluster's head, got {shown(address)}; from a "
                "machine outside the cluster set cluster.ray.submit"
            )
        return address

    @field_validator("submit")
    @classmethod
    def _is_a_dashboard(cls, url: str | None) -> str | None:
        if url is not None and not is_server_url(url):
            raise ValueError(
                "must be the address of a Ray cluster's dashboard, http://HOST:8265, got "
                f"{shown(url)}"
            )
        return url
