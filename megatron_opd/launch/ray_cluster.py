"""Runs the processes of a run on a Ray cluster: a bundle and an actor for each.

Every server has a placement group of one bundle, which lies on one node; the nodes of the learner
have a group of a bundle each. Ray moves the bundles of a lost node where there is room.

Invariant: groups have no name and actors no life of their own, so Ray ends all of them with this
process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_opd.config.ray import RayConfig
from megatron_opd.launch.gpus import torch_is_for_cpus
from megatron_opd.launch.launcher import CannotPlace, Need, NodePlace, ProcessSpec
from megatron_opd.launch.parts import LEARNER
from megatron_opd.launch.ray_capacity import (
    BundleSpot,
    Capacity,
    capacity,
    check_possible,
    fitting_nodes,
    in_order,
    waits_for,
)
from megatron_opd.launch.ray_connection import connect
from megatron_opd.launch.ray_node import NodeOwner
from megatron_opd.launch.ray_process import RayProcess

SAY_EVERY_S = 30.0
POLL_S = 1.0
REPLY_S = 5.0
CALLS = 8  # of an actor, at the same time


@dataclass(frozen=True, slots=True)
class Bundle:
    """Names a bundle of a placement group, with the actor in it and its spot once it has one."""

    group: Any
    index: int
    actor: Any = None
    spot: BundleSpot | None = None

    @property
    def there(self) -> BundleSpot:
        """Returns where it is."""
        assert self.spot is not None
        return self.spot


class RayLauncher:
    """Places processes on a Ray cluster. Any thread may call any method.

    insecure: beyond this machine, the cluster may be open to whoever reaches it.
    """

    def __init__(self, settings: RayConfig, *, insecure: bool = False) -> None:
        self._settings, self._insecure = settings, insecure
        self._lock, self._idle = threading.RLock(), threading.Condition()
        self._closed = threading.Event()
        self._connected, self._busy = False, 0
        self._bundles: dict[Need, Bundle] = {}

    @property
    def host(self) -> str:
        """Returns this machine's address in the cluster. CannotPlace: it belongs to none."""
        self._connect()
        import ray

        return ray.util.get_node_ip_address()

    @property
    def gpus(self) -> int:
        """Returns how many GPUs the cluster has; 1 where it may add some. CannotPlace: no cluster.

        0: the run is on CPUs.
        """
        self._connect()
        import ray

        found = int(ray.cluster_resources().get("GPU", 0))
        may_come = self._settings.autoscaling and not torch_is_for_cpus()
        return found or int(may_come)

    def reserve(self, needs: Sequence[Need], say: Callable[[str], None]) -> tuple[NodePlace, ...]:
        """Return a place for each need, once there is room for all. CannotPlace: never."""
        self._connect()
        with self._in_use():
            return self._reserve(needs, say)

    def _reserve(self, needs: Sequence[Need], say: Callable[[str], None]) -> tuple[NodePlace, ...]:
        import ray

        settings = self._settings
        if not settings.autoscaling:
            nodes = [capacity(node["Resources"]) for node in ray.nodes() if node["Alive"]]
            check_possible(needs, settings.cpus, nodes)
        talk = _Talk(needs, settings.cpus, say)
        learner = [need for need in needs if need.key == LEARNER]
        teachers = [need for need in needs if need.key.startswith("teacher")]
        students = [need for need in needs if need not in learner and need not in teachers]
        found = self._enter(self._learner_group(learner), talk)
        away_from = {bundle.there.node for bundle in found.values()}
        found |= self._enter(self._server_groups(teachers, away_from), talk)
        found |= self._enter(self._server_groups(students), talk)
        order = in_order({need: bundle.there for need, bundle in found.items()})
        self._bundles |= {need: found[order[need]] for need in needs}
        return tuple(_place(need, self._bundles[need].there) for need in needs)

    def process(self, spec: ProcessSpec, place: NodePlace) -> RayProcess:
        """Return the process, not started, that runs at a reserved place."""
        bundle = self._bundles[place.need]
        return RayProcess(spec, bundle.actor, partial(_why_lost, bundle.there))

    def replace(self, place: NodePlace, say: Callable[[str], None]) -> NodePlace:
        """Return the place again, or another one where its node is lost."""
        with self._in_use():
            return self._replace(place, say)

    def _replace(self, place: NodePlace, say: Callable[[str], None]) -> NodePlace:
        import ray
        from ray.exceptions import GetTimeoutError, RayActorError

        need, bundle = place.need, self._bundles[place.need]
        try:
            ray.get(bundle.actor.stop.remote(0.0), timeout=REPLY_S)
            return place
        except (RayActorError, GetTimeoutError):
            ray.kill(bundle.actor)
        talk = _Talk([need], self._settings.cpus, say)
        found = self._bundles[need] = self._enter({need: bundle}, talk)[need]
        return place if found.there.node == bundle.there.node else _place(need, found.there)

    def close(self) -> None:
        """Give everything back, and leave the cluster. Safe to repeat."""
        self._closed.set()
        with self._idle:  # Ray ends a thread that waits for it at shutdown
            self._idle.wait_for(lambda: self._busy == 0)
        with self._lock:
            if self._connected:
                import ray

                self._connected = False
                ray.shutdown()  # ends the actors and groups of this driver

    def _connect(self) -> None:
        with self._lock:
            if not self._connected:
                connect(self._settings, insecure=self._insecure)
                self._connected = True

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep `close` from leaving the cluster meanwhile."""
        with self._idle:
            self._busy += 1
        try:
            yield
        finally:
            with self._idle:
                self._busy -= 1
                self._idle.notify_all()

    def _learner_group(self, needs: Sequence[Need]) -> dict[Need, Bundle]:
        """Ask for one placement group with a bundle for each node of the learner."""
        from ray.util.placement_group import placement_group

        if not needs:
            return {}
        group = placement_group([self._shape(need) for need in needs], strategy="PACK")
        return {need: Bundle(group, index) for index, need in enumerate(needs)}

    def _server_groups(
        self, needs: Iterable[Need], away_from: Collection[str] = ()
    ) -> dict[Need, Bundle]:
        """Ask for a placement group for each server, on other nodes than these if there is room."""
        from ray.util.placement_group import placement_group

        ordered = sorted(needs, key=lambda need: -need.gpus)  # before the small ones fill nodes
        free = {node: room for node, room in _free().items() if node not in away_from}
        targets = fitting_nodes(ordered, self._settings.cpus, free) if away_from else {}
        return {
            need: Bundle(
                placement_group(
                    [self._shape(need)],
                    strategy="STRICT_PACK",
                    _soft_target_node_id=targets.get(need),
                ),
                0,
            )
            for need in ordered
        }

    def _shape(self, need: Need) -> dict[str, float]:
        return {"CPU": self._settings.cpus} | ({"GPU": need.gpus} if need.gpus else {})

    def _enter(self, bundles: Mapping[Need, Bundle], talk: _Talk) -> dict[Need, Bundle]:
        """Start an actor in each bundle, once that has a node, and return them with their spots."""
        import ray
        from ray.exceptions import RayActorError

        entered: dict[Need, Bundle] = {}
        asked: dict[Any, tuple[Need, Bundle]] = {}

        def ask(need: Need, bundle: Bundle) -> None:
            actor = self._actor(bundle, need)
            asked[actor.spot.remote()] = need, replace(bundle, actor=actor)

        for need, bundle in bundles.items():
            ask(need, bundle)
        while asked:
            if self._closed.is_set():
                raise CannotPlace("the Ray cluster was left while the run waited for room")
            talk.now_and_then()
            ready, _ = ray.wait(list(asked), timeout=POLL_S)
            for reply in ready:
                need, bundle = asked.pop(reply)
                try:
                    entered[need] = replace(bundle, spot=ray.get(reply))
                    talk.there(need)
                except RayActorError as error:
                    if error.actor_init_failed:
                        raise CannotPlace(_cannot_start(need, error)) from None
                    ask(need, bundle)  # its node was lost just then
        return entered

    def _actor(self, bundle: Bundle, need: Need) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        there = PlacementGroupSchedulingStrategy(
            placement_group=bundle.group, placement_group_bundle_index=bundle.index
        )
        options = {
            "num_cpus": self._settings.cpus,
            "num_gpus": need.gpus,
            "max_concurrency": CALLS,
            "scheduling_strategy": there,
        }
        return ray.remote(NodeOwner).options(**options).remote()


class _Talk:
    """Says now and then which needs still wait."""

    def __init__(self, needs: Iterable[Need], cpus: float, say: Callable[[str], None]) -> None:
        self._waiting, self._cpus, self._say = list(needs), cpus, say
        self._next_s = time.monotonic() + SAY_EVERY_S

    def there(self, need: Need) -> None:
        self._waiting.remove(need)

    def now_and_then(self) -> None:
        if time.monotonic() >= self._next_s:
            self._say(waits_for(self._waiting, self._cpus, list(_free().values())))
            self._next_s += SAY_EVERY_S


def _cannot_start(need: Need, error: Exception) -> str:
    last = str(error).strip().splitlines()[-1]
    return (
        f"{need.name}: the node's Python cannot run this program: {last.strip()}; install the "
        "same versions of megatron-opd and Ray on every node"
    )


def _free() -> dict[str, Capacity]:
    """Return what each living node has left."""
    from ray._private.state import available_resources_per_node

    return {node: capacity(left) for node, left in available_resources_per_node().items()}


def _place(need: Need, spot: BundleSpot) -> NodePlace:
    return NodePlace(need, spot.host, spot.port, spot.name)


def _why_lost(spot: BundleSpot, error: str) -> str:
    import ray

    if any(node["NodeID"] == spot.node and node["Alive"] for node in ray.nodes()):
        return f"Ray ended its actor on node {spot.name}: {' '.join(error.split())}"
    return f"node {spot.name} of the Ray cluster was lost"
