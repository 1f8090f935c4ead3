"""Seconds of collectives over equal links: latency and bandwidth (α–β), ring algorithms. No JAX.

The rings are those of Patarasuk and Yuan (2009), which NCCL uses for large messages: with p devices
each of the p - 1 steps of a gather or scatter moves 1/p of the value, and an all-reduce is a
reduce-scatter followed by an all-gather. `size_bytes` is always of the whole value.
"""

from __future__ import annotations

from hetpass.ir.devices import Link


def all_gather_s(size_bytes: float, devices: int, link: Link | None) -> float:
    """Every device has 1/p of a value and ends with all of it."""
    return _steps(size_bytes, devices, link, devices - 1)


def reduce_scatter_s(size_bytes: float, devices: int, link: Link | None) -> float:
    """Every device has a summand and ends with 1/p of the sum."""
    return _steps(size_bytes, devices, link, devices - 1)


def all_reduce_s(size_bytes: float, devices: int, link: Link | None) -> float:
    """Every device has a summand and ends with the sum."""
    return _steps(size_bytes, devices, link, 2 * (devices - 1))


def all_to_all_s(size_bytes: float, devices: int, link: Link | None) -> float:
    """Every device has 1/p of a value and ends with 1/p of it, cut along another dimension."""
    return _steps(size_bytes / devices, devices, link, devices - 1)


def permute_s(size_bytes: float, link: Link | None) -> float:
    """Every device sends what it has, `size_bytes`, to one other."""
    if size_bytes == 0:
        return 0.0
    if link is None:
        raise ValueError("a permutation over several devices needs a link")
    return link.seconds(size_bytes)


def _steps(size_bytes: float, devices: int, link: Link | None, steps: int) -> float:
    """Steps in which every device sends 1/p of `size_bytes` to its neighbour."""
    if devices == 1 or size_bytes == 0:
        return 0.0
    if link is None:
        raise ValueError("a collective over several devices needs a link")
    return steps * link.seconds(size_bytes / devices)
