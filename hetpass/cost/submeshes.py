"""Which parts of a device group a stage may take, and where they lie. No JAX.

In a group of one host every count of devices is a part, up to 16; beyond, powers of two and three
times those. In a group of several hosts parts of a host are chosen so that each divides the next
(1, 2, 4, … host), and larger ones are whole hosts: then parts can always be placed side by side
without cutting one across hosts, as in a buddy allocator, whatever the order they were chosen in.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetpass.cost.analytic import Submesh
from hetpass.ir.devices import DeviceGroup

_EVERY_COUNT = 16


def submesh_sizes(group: DeviceGroup, *, whole_hosts: bool = False) -> tuple[int, ...]:
    """Counts of devices that a stage may take, smallest first.

    Args:
      whole_hosts: parts of a host are left out (unless the group is one host).
    """
    if group.hosts == 1:
        return _counts(group.num_devices)
    per_host = group.devices_per_host
    inside = [n for n in _powers(per_host) if per_host % n == 0 and n < per_host]
    hosts = [hosts * per_host for hosts in _counts(group.hosts)]
    return tuple(hosts) if whole_hosts else tuple(inside + hosts)


def submeshes(group: DeviceGroup, devices: int, examples: int, most_model: int) -> list[Submesh]:
    """The ways to arrange `devices` as data × model.

    The data axis divides the examples of a microbatch; the model axis is a power of two inside a
    host, at most `most_model`.
    """
    largest = min(devices, group.devices_per_host, most_model)
    return [
        Submesh(devices // model, model)
        for model in _powers(largest)
        if devices % model == 0
        and examples % (devices // model) == 0
        and (devices <= group.devices_per_host or group.devices_per_host % model == 0)
    ]


def placed(group: DeviceGroup, sizes: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Device indices for parts of the given sizes, in the order of `sizes`.

    Large parts are placed first, each at the first host or run of hosts that has room.

    Raises:
      ValueError: the parts do not fit side by side.
    """
    per_host = group.devices_per_host
    used = [0] * group.hosts
    starts: dict[int, int] = {}
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        hosts = -(-size // per_host)
        for first in range(group.hosts - hosts + 1):
            run = used[first : first + hosts]
            if (hosts == 1 and run[0] + size <= per_host) or not any(run):
                break
        else:
            raise ValueError(f"parts of {list(sizes)} devices do not fit into {group}")
        starts[index] = first * per_host + used[first]
        for offset in range(hosts):
            used[first + offset] += min(size - offset * per_host, per_host)
    return tuple(
        tuple(range(starts[index], starts[index] + size)) for index, size in enumerate(sizes)
    )


def _counts(total: int) -> tuple[int, ...]:
    if total <= _EVERY_COUNT:
        return tuple(range(1, total + 1))
    powers = _powers(total)
    threes = tuple(3 * p for p in powers if 3 * p <= total)
    return tuple(sorted({*powers, *threes, total}))


def _powers(largest: int) -> tuple[int, ...]:
    return tuple(1 << e for e in range(largest.bit_length()) if 1 << e <= largest)
