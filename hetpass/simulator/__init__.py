"""Plays schedules over lanes and links: costs in, a Timeline out. No JAX."""

from hetpass.simulator.simulate import makespan_s, simulate

__all__ = ["makespan_s", "simulate"]
