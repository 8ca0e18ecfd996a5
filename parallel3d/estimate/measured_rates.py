"""Prices a machine by the rates that `parallel3d calibrate` measured on it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from parallel3d.calibrate.record import GroupTime, MeasuredRates
from parallel3d.estimate.fitted_cost import NETWORKS, SPEEDS, Constants, GroupRates, load_own

# The measured rates take the place of the constants of these members.
_SPEED, _NETWORK = SPEEDS.index("h100/bf16"), NETWORKS.index("ndr")
# Operations of a layer's forward and backward, of a micro-batch without its layers, and of a
# layer's experts, each of which the host launches.
LAYER_LAUNCHES, BATCH_LAUNCHES, EXPERTS_LAUNCHES = 75, 100, 150


def sizes_of_machine(machine: MeasuredRates, ranks: int) -> dict[str, float]:
    """Returns the fields of `StepWork` that describe the hardware of each of `ranks` ranks.

    On CPUs the ranks share the cores evenly, although ranks that wait leave them to others.
    """
    rates = machine.rates
    cores = machine.made.count / ranks if machine.shares_cores else 1.0
    memory = 1e9 * rates["memory_gb"]
    return {
        "gpus_per_node": ranks if machine.shares_cores else machine.made.count,
        "peak": 1e12 * rates["product_tflops"] * cores,
        "peak_attention": 1e12 * rates["attention_tflops"] * cores,
        "memory_bytes": memory / ranks if machine.shares_cores else memory,
        "memory_rate": 1e9 * rates["memory_gb_per_s"] * min(1.0, cores),
        "units": rates["units"],
        "speed": _SPEED,
        "fabric": _NETWORK,
        "link_rate": 1e9 * max(of.gb_per_s for of in _within(machine, "all_gather").values()),
        "fabric_rate": 1e9 * _network(machine)[0],
    }


def constants_of_machine(machine: MeasuredRates) -> Constants:
    """Returns the constants of the price, with the measured rates in place of fitted ones."""
    rates, launch = machine.rates, machine.rates["launch_us"]
    network = NETWORKS[_NETWORK]
    values = {**load_own("h100").values} | {
        f"speed.{SPEEDS[_SPEED]}.rate": 1.0,
        "gemm.ramp": rates["product_ramp"],
        "engine.megatron.flash": 1.0,
        "memory.rate": 1.0,
        "link.rate": 1.0,
        f"network.{network}.rate": 1.0,
        f"network.{network}.latency_us": _network(machine)[1],
        f"network.{network}.begin_us": _network(machine)[1],
        f"network.{network}.crowd_us": 0.0,
        "engine.megatron.launch_us": LAYER_LAUNCHES * launch,
        "engine.megatron.batch_us": BATCH_LAUNCHES * launch,
        # The measured latencies of collectives and messages contain the host's work.
        "engine.megatron.launch_tp_us": 0.0,
        "engine.megatron.slowest_us": 0.0,
        "engine.megatron.hop_us": 0.0,
        "experts.launch_us": EXPERTS_LAUNCHES * launch,
        "experts.link": 1.0,
        "experts.network": 1.0,
    }
    if machine.shares_cores:  # the cores that launch operations also compute, and send messages
        values |= {"launch.power": 1.0, "gemm.gap_us": 0.0, "step.fixed_us": 0.0}
        values |= {"cp.exposed": 1.0, "pp.exposed": 1.0}
    groups = {
        op: GroupRates(
            np.array([*of], dtype=float),
            np.array([time.gb_per_s * 1e9 for time in of.values()]),
            np.array([time.latency_us * 1e-6 for time in of.values()]),
        )
        for op in machine.groups
        if (of := _within(machine, op))
    }
    return Constants(values, groups)


def _within(machine: MeasuredRates, op: str) -> Mapping[int, GroupTime]:
    """Returns the times of the groups whose ranks are on one host."""
    of = machine.groups[op]
    if machine.shares_cores:
        return of
    return {n: time for n, time in of.items() if n <= machine.made.count} or of


def _network(machine: MeasuredRates) -> tuple[float, float]:
    """Returns the 1e9 bytes/s of a GPU's share of the network, and the microseconds of a step.

    Without a network they are those inside the host, and no layout uses them.
    """
    gathers = machine.groups["all_gather"]
    if not machine.has_network:
        time = next(iter(gathers.values()))
        return time.gb_per_s, time.latency_us
    ranks = min(n for n in gathers if n > machine.made.count)
    time = gathers[ranks]
    return time.gb_per_s / machine.made.count, time.latency_us / (ranks - 1)
