"""`python -m control_plane.providers.ray_driver ADDRESS NAMESPACE`: the process that speaks to one Ray cluster.

The only place that imports ray. A process holds one cluster at most, and Ray ends the process when its node goes; here
that is a child of the control plane, which starts another. Calls come as JSON lines on stdin and are answered on
stdout, each by its `id`; when stdin ends, so does this.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError
from ray.experimental import internal_kv as kv
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from control_plane.domain import Phase
from control_plane.providers.ray_marks import ENDED, LIVE, STARTED, end_processes, stage_mark
from control_plane.providers.ray_replica import Ending, RayReplica

_AT_ONCE = 16
_ANSWER_SECONDS = 5.0
_BEING_MADE_SECONDS = 5.0
_ENDED_KEPT = 4096
_LAST_LINES = 200
Json = dict[str, Any]


class Driver:
    """The verbs, on marks and actors of `namespace`. Each is safe to repeat and may run in any thread."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._ended = 0

    def nodes(self) -> list[Json]:
        """Labels and resources of the nodes that are alive."""
        return [{"labels": n["Labels"], "resources": n["Resources"]} for n in ray.nodes() if n["Alive"]]

    def known(self, replica_id: str) -> bool:
        """Whether it runs, ran or has ended: then it isn't started."""
        return self._has(ENDED, replica_id) or self._has(STARTED, replica_id) or self._actor(replica_id) is not None

    def ensure(
        self,
        replica_id: str,
        order: str,
        resources: dict[str, float],
        hosts: int,
        selector: dict[str, str],
        queue_seconds: float,
    ) -> None:
        """`resources` are each host's; `queue_seconds` bounds its wait for them."""
        if self.known(replica_id):
            return
        self._put(LIVE, replica_id, until=time.time() + queue_seconds)
        options: Json = {
            "name": replica_id,
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": 0,
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            "resources": {name: value for name, value in resources.items() if name not in ("CPU", "GPU")},
        }
        if hosts > 1 or resources.get("GPU", 0) > 1:
            group = self._group(replica_id, resources, hosts, selector)
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        else:
            options["label_selector"] = selector
        try:
            ray.remote(RayReplica).options(**options).remote(order)
        except ValueError:
            if self._actor(replica_id) is None:
                raise

    def describe(self, replica_id: str) -> Json:
        """`Description` as plain values, with the labels of its node."""
        actor = self._actor(replica_id)
        if actor is None:
            return self._without_actor(replica_id)
        if not self._has(STARTED, replica_id):
            return self._queued(replica_id)
        try:
            said = dict(ray.get(actor.describe.remote(), timeout=_ANSWER_SECONDS))
        except RayActorError:
            return self._without_actor(replica_id)
        mark = self._mark(STARTED, replica_id)
        beside = [self._labels(node) or {} for node in mark.get("beside") or []]
        return said | {"began_at": mark.get("at"), "labels": self._labels(mark.get("node")), "beside": beside}

    def list_owned(self) -> list[str]:
        found = kv._internal_kv_list(LIVE, namespace=self._namespace)
        return sorted({key.decode().removeprefix(LIVE) for key in found} | set(ray.util.list_named_actors()))

    def terminate(self, replica_id: str, patience: float) -> Json | None:
        """Returns what it logged last, and the labels of its node, when it is seen to be gone just now.

        A supervisor that hasn't answered for `patience` seconds isn't waited for any more.
        """
        if not self._has(ENDED, replica_id):
            self._put(ENDED, replica_id)
            self._forget_old()
        actor = self._actor(replica_id)
        started = self._mark(STARTED, replica_id)
        last = None
        if started and not self._ends(actor, replica_id, started, patience):
            return None
        if actor is not None:
            with suppress(RayError):  # its supervisor is dead, or as good as that
                lines, position = self.logs(replica_id, _LAST_LINES, None) or ([], 0)
                last = {"lines": lines, "position": position, "labels": self._labels(started.get("node"))}
            ray.kill(actor)
        with suppress(ValueError):  # most have none
            remove_placement_group(get_placement_group(self._group_name(replica_id)))
        for mark in (LIVE, STARTED):
            kv._internal_kv_del(mark + replica_id, namespace=self._namespace)
        return last

    def equip(self, replica_id: str, pair: str, authority: str) -> None:
        actor = self._actor(replica_id)
        if actor is not None:
            ray.get(actor.equip.remote(pair, authority), timeout=_ANSWER_SECONDS)

    def logs(self, replica_id: str, lines: int, after: int | None) -> tuple[list[str], int] | None:
        """None where there is nobody to ask."""
        actor = self._actor(replica_id)
        if actor is None or not self._has(STARTED, replica_id):
            return None
        said, position = ray.get(actor.logs.remote(lines, after), timeout=_ANSWER_SECONDS)
        return said, position

    def _labels(self, node_id: str | None) -> dict[str, str] | None:
        """Of a node; None where the cluster doesn't know that one."""
        found = [dict(node["Labels"]) for node in ray.nodes() if node["NodeID"] == node_id]
        return found[0] if found else None

    def _without_actor(self, replica_id: str) -> Json:
        if not self._has(LIVE, replica_id):
            return {"phase": Phase.ABSENT}
        if self._has(STARTED, replica_id) or self._has(ENDED, replica_id):
            return {"phase": Phase.EXITED, "code": "replica_lost", "message": "its node or its supervisor is gone"}
        if self._since(LIVE, replica_id) < _BEING_MADE_SECONDS:
            return {"phase": Phase.STARTING}
        message = "no supervisor could be started on a node: the same ingle must be installed there"
        return {"phase": Phase.FAILED, "code": "start_failed", "message": message}

    def _queued(self, replica_id: str) -> Json:
        mark = self._mark(LIVE, replica_id)
        if time.time() <= mark.get("until", float("inf")):
            return {"phase": Phase.STARTING}
        waited = time.time() - mark["at"]
        message = f"waited {waited:.0f} s in the cluster's queue: all of its region's nodes are taken"
        return {"phase": Phase.FAILED, "code": "no_capacity", "message": message}

    def _ends(self, actor: Any | None, replica_id: str, started: Json, patience: float) -> bool:
        """Whether nothing of it is left, by its supervisor's word or by a look on its nodes."""
        if actor is not None:
            try:
                ending: Ending = ray.get(actor.terminate.remote(), timeout=_ANSWER_SECONDS)
                if ending != "unsure":
                    return ending == "gone"
            except RayActorError:
                pass
            except GetTimeoutError:
                if self._since(ENDED, replica_id) < patience:
                    return False
            ray.kill(actor)
        return all(self._ends_on(node, name) for node, name in self._places(replica_id, started))

    def _places(self, replica_id: str, started: Json) -> list[tuple[str, str]]:
        """Nodes that are alive and may have processes of it, and what those carry there."""
        alive = [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
        beside = started.get("beside")
        if beside is None:  # it may have been lost before it could say where its further hosts are
            beside = alive if started.get("hosts", 1) > 1 else []
            further = [(node, stage_mark(replica_id, n)) for node in beside for n in range(1, int(started["hosts"]))]
        else:
            further = [(node, stage_mark(replica_id, number)) for number, node in enumerate(beside, 1)]
        return [(node, name) for node, name in [(str(started["node"]), replica_id), *further] if node in alive]

    def _ends_on(self, node: str, name: str) -> bool:
        there = NodeAffinitySchedulingStrategy(node, soft=False)
        look = ray.remote(end_processes).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
        try:
            return bool(ray.get(look.remote(name), timeout=_ANSWER_SECONDS))
        except RayError:  # its node just went, or is too busy: the next call looks again
            return False

    def _group(self, replica_id: str, resources: dict[str, float], hosts: int, selector: dict[str, str]) -> Any:
        """All of it at once, or nothing: on one node, or on as many as there are hosts."""
        name = self._group_name(replica_id)
        try:
            return get_placement_group(name)
        except ValueError:
            return placement_group(
                [resources] * hosts,
                "STRICT_PACK" if hosts == 1 else "STRICT_SPREAD",
                name=name,
                lifetime="detached",
                bundle_label_selector=[selector] * hosts,
            )

    def _group_name(self, replica_id: str) -> str:
        return f"{self._namespace}-{replica_id}"

    def _actor(self, replica_id: str) -> Any | None:
        try:
            return ray.get_actor(replica_id, namespace=self._namespace)
        except ValueError:
            return None

    def _put(self, mark: str, replica_id: str, **more: float) -> None:
        value = json.dumps({"at": time.time(), **more})
        kv._internal_kv_put(mark + replica_id, value, namespace=self._namespace)

    def _mark(self, mark: str, replica_id: str) -> Json:
        """What a mark says; nothing where there is none."""
        value = kv._internal_kv_get(mark + replica_id, namespace=self._namespace)
        return dict(json.loads(value)) if value else {}

    def _has(self, mark: str, replica_id: str) -> bool:
        return bool(kv._internal_kv_exists(mark + replica_id, namespace=self._namespace))

    def _since(self, mark: str, replica_id: str) -> float:
        """Seconds since the mark was made; 0 where there is none."""
        return time.time() - float(self._mark(mark, replica_id).get("at", time.time()))

    def _forget_old(self) -> None:
        """Keep the number of marks bounded: an id that ended long ago isn't asked for again."""
        self._ended += 1
        if self._ended % (_ENDED_KEPT // 4) != 1:
            return
        found = kv._internal_kv_list(ENDED, namespace=self._namespace)
        if len(found) <= _ENDED_KEPT:
            return
        since = {key: self._since(ENDED, key.decode().removeprefix(ENDED)) for key in found}
        for key in sorted(found, key=since.__getitem__)[_ENDED_KEPT:]:
            kv._internal_kv_del(key, namespace=self._namespace)


def answer(verb: Callable[..., Any], arguments: Json) -> Json:
    """The verb's result, or what went wrong as `code` and `message`."""
    try:
        return {"result": verb(**arguments)}
    except ActorUnschedulableError as error:
        return {"code": "no_capacity", "message": str(error)[:500]}
    except GetTimeoutError:
        return {"code": "replica_unreachable", "message": "its supervisor doesn't answer"}
    except (RayError, ConnectionError, TimeoutError, ValueError, RuntimeError) as error:
        return {"code": "cluster_error", "message": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    address, namespace = sys.argv[1:3]
    # What Ray or anything else prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    ray.init(address=address, namespace=namespace, log_to_driver=False, configure_logging=False)
    driver = Driver(namespace)
    verbs = {
        name: getattr(driver, name) for name in ("nodes", "known", "ensure", "describe", "list_owned", "terminate")
    }
    verbs |= {"equip": driver.equip, "logs": driver.logs}
    _say(answers, {"id": 0, "result": "connected"})
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for line in sys.stdin.buffer:
            call = json.loads(line)
            pool.submit(_serve, answers, call["id"], verbs[call["verb"]], call["arguments"])
        os._exit(0)


_writing = threading.Lock()


def _serve(answers: BinaryIO, number: int, verb: Callable[..., Any], arguments: Json) -> None:
    _say(answers, {"id": number, **answer(verb, arguments)})


def _say(answers: BinaryIO, entry: Json) -> None:
    with _writing:
        answers.write(json.dumps(entry).encode() + b"\n")


if __name__ == "__main__":
    main()
