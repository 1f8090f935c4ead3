"""What a user says about the processes that a step runs in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hetpass.backend.emulate import Emulation
from hetpass.errors import ExecutionError
from hetpass.ir.cluster import Cluster
from hetpass.runtime.distributed.crew import Crew
from hetpass.runtime.distributed.driver import Conversation
from hetpass.runtime.transport.message import Slowness
from hetpass.runtime.watchdog import Limits

TransportName = Literal["tcp", "jax", "ray"]


_BY_GROUP = ("environment", "cores", "emulation", "slowness")


@dataclass(frozen=True)
class WorkerOptions:
    """How workers are started.

    Attributes:
      address: of a Ray cluster that runs already ("auto", "host:port"); None: one is started on
        this machine, and ended with the driver.
      interface: the address that every socket listens at. None: 127.0.0.1 if Ray is started
        here, else the address by which Ray knows the worker's host.
      transport: how arrays get from group to group: "tcp", "jax" (JAX's transfer library) or "ray"
        (Ray's object store).
      limits: of the watchdog.
      environment: variables of the workers, by group; "" for all groups.
      cores: the CPU cores that a group's workers keep to, for experiments.
      emulation: by group, how its devices are to behave, for experiments.
      slowness: by (from, to) group, what is added to their link, for experiments.
    """

    address: str | None = None
    interface: str | None = None
    transport: TransportName = "tcp"
    limits: Limits = field(default_factory=Limits)
    environment: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cores: Mapping[str, Sequence[int]] = field(default_factory=dict)
    emulation: Mapping[str, Emulation] = field(default_factory=dict)
    slowness: Mapping[tuple[str, str], Slowness] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.transport not in ("tcp", "jax", "ray"):
            raise ExecutionError(
                "HP-RUN-TRANSPORT",
                f"transport is {self.transport!r}",
                where="transport",
                ways_out=['"tcp"', '"jax"', '"ray"'],
            )
        for name, sort, way in (
            ("address", str, '"auto", "host:port" or None'),
            ("interface", str, "an address of this host, or None"),
            ("limits", Limits, "hp.Limits(...)"),
            *((name, Mapping, "a mapping by group") for name in _BY_GROUP),
        ):
            value = getattr(self, name)
            if value is not None and not isinstance(value, sort):
                raise _no_option(f"WorkerOptions.{name}", value, way)

    def check(self, cluster: Cluster) -> None:
        """Refuses groups that the cluster does not have."""
        for names in (self.environment, self.cores, self.emulation, *self.slowness):
            for name in names:
                if name:
                    cluster.group(name)


def _no_option(name: str, value: object, way: str) -> ExecutionError:
    return ExecutionError(
        "HP-RUN-OPTION", f"{name} is a {type(value).__name__}", where=name, ways_out=[way]
    )


class Workers:
    """The processes of a cluster: `het_parallelize(step, cluster=..., runtime=hp.Workers(...))`.

    They start when a step is first compiled, one per host of each group, and end with `close`, at
    the end of a `with` block, with the driver, or with the first failure. Steps that are given the
    same Workers and cluster share them, and can hand each other their arrays.

    Args:
      transport, address, limits: as in WorkerOptions; or all `options` at once.
      crew: what starts the workers of a cluster; None: Ray.
    """

    def __init__(
        self,
        *,
        options: WorkerOptions | None = None,
        transport: TransportName = "tcp",
        address: str | None = None,
        limits: Limits | None = None,
        crew: Callable[[Cluster], Crew] | None = None,
    ) -> None:
        if options is not None and not isinstance(options, WorkerOptions):
            raise _no_option("Workers.options", options, "hp.WorkerOptions(...)")
        self.options = options or WorkerOptions(
            address=address, transport=transport, limits=limits or Limits()
        )
        self._crew = crew
        self._talk: Conversation | None = None
        self._cluster: Cluster | None = None

    def talk(self, cluster: Cluster) -> Conversation:
        """With the workers of the cluster, who are started if need be.

        Raises:
          ExecutionError: HP-RUN-RAY, Ray is missing or does not start them; HP-RUN-CLUSTER, they
            have been started for another cluster.
        """
        if self._talk is not None and self._talk.crew.closed:
            self._talk = None
        if self._talk is None:
            self.options.check(cluster)
            self._talk = Conversation(self._started(cluster))
            self._cluster = cluster
        if cluster != self._cluster:
            raise ExecutionError(
                "HP-RUN-CLUSTER",
                "these workers were started for another cluster",
                ways_out=["give every cluster its own hp.Workers()", "close them first"],
            )
        return self._talk

    def _started(self, cluster: Cluster) -> Crew:
        if self._crew is not None:
            return self._crew(cluster)
        from hetpass.runtime.distributed.ray_crew import RayCrew

        return RayCrew(cluster, self.options)

    def close(self) -> None:
        """Ends the processes; arrays that live in them are gone."""
        if self._talk is not None:
            self._talk.crew.close()
            self._talk = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
