"""What the ranks of a learner do in tests of weight syncs by way of a directory."""

from __future__ import annotations

from pathlib import Path

from megatron_opd.config.schema import Config
from megatron_opd.models.gather import FullTensors
from megatron_opd.weight_sync.disk import Disk
from megatron_opd.weight_sync.disk_writer import DiskWriter
from megatron_opd.weight_sync.plan import ServerLayout
from sglang_bridge.weights import changes, manifest
from tests.dist.shard_jobs import Ask, Fleet, config_of, require_held, serve_fleets, wanted_of
from tests.support.receiving import ThreadFleet

BLOCK, CHUNK_BYTES = 128, 1024  # small enough that the tiny models' slices have many
STEPS = ("nothing", "small step", "step", "small step", "small step")


def disk_to_fleets(
    out: Path, *, models: dict[str, Path], parallel: dict[str, int], fleets: list[Fleet]
) -> None:
    """Writes every model's weights, and changes of them, for all its fleets to read."""
    changes.BLOCK, manifest.CHUNK_BYTES = BLOCK, CHUNK_BYTES
    # every rank gets here by the same way: the directory's parent is there
    sync = {"type": "disk", "directory": str(out / "weights"), "delta": True, "keep_versions": 1}
    configs = {fleet: config_of(models[fleet.model], parallel, fleet, **sync) for fleet in fleets}
    serve_fleets(models, configs, DiskWriter, _control)


async def _control(ask: Ask, full: FullTensors, *, config: Config, fleet: Fleet) -> None:
    root = config.weight_sync.directory
    assert root is not None
    layouts = [ServerLayout(*s) for s in fleet.servers]
    servers = ThreadFleet(full.spec, layouts, fleet.dtype, weights_dir=str(root))
    disk = Disk(servers, ask, config)
    await disk.open()
    whole = disk.num_bytes
    assert whole == max(rank.num_bytes for rank in servers.ranks())
    read: list[int] = []
    for version, step in enumerate(STEPS):
        await ask(step) if version else None
        if version == len(STEPS) - 1:
            await servers.restart()  # catches up from the whole version and the changes since
        await disk.stage(version)
        await disk.send(version)
        exported = await ask("export")
        assert disk.tensors == exported.keys(), disk.tensors ^ exported.keys()
        require_held(servers, wanted_of(exported, fleet), fleet)
        read.append(disk.num_bytes)
    assert read[0] > whole
    assert read[1] < read[0]
    assert read[4] > read[0]
    pieces = [p for found in servers.described(digests=True).values() for p in found]
    assert await ask(pieces) == [piece.digest for piece in pieces], "digests"
    await disk.close()
    # one run's directory, in it the two newest versions and what they are based on
    (stream,) = root.iterdir()
    assert len(list(stream.glob("*-version-*"))) == len(STEPS)
