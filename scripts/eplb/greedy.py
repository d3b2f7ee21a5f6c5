"""DeepSeek's published expert placement, written from its description: the baseline.

Each redundant slot goes to the expert with the largest load per replica. The replicas are then
packed in order of load, each onto the device with the least load that has a free slot. (Its
hierarchical form packs groups of experts onto nodes first; a model without expert groups is one
group, for which both forms are the same.) Loads are averages over the steps that were seen, and an
expert's tokens are shared evenly among its replicas.
"""

import numpy as np

from sharding.placement import Placement


def greedy_placement(loads: np.ndarray, num_devices: int, num_redundant: int) -> Placement:
    """A placement made afresh for mean loads [L, E]."""
    num_layers, num_experts = loads.shape
    num_slots = num_experts + num_redundant
    slots = np.empty((num_layers, num_slots), np.int32)
    for layer, load in enumerate(loads):
        counts = np.ones(num_experts)
        for _ in range(num_redundant):
            counts[np.argmax(load / counts)] += 1
        replicas = np.repeat(np.arange(num_experts), counts.astype(int))
        slots[layer] = _packed(replicas, load / counts, num_devices)
    return Placement(slots, num_experts, num_devices)


def _packed(replicas: np.ndarray, load: np.ndarray, num_devices: int) -> np.ndarray:
    """[P], the replicas in the order of devices."""
    per_device = len(replicas) // num_devices
    held: list[list[int]] = [[] for _ in range(num_devices)]
    total = np.zeros(num_devices)
    for expert in replicas[np.argsort(-load[replicas], kind="stable")]:
        device = int(np.argmin(total))
        held[device].append(int(expert))
        total[device] += load[expert]
        if len(held[device]) == per_device:
            total[device] = np.inf
    return np.concatenate(held)


def evenly_shared(loads: np.ndarray, placement: Placement) -> np.ndarray:
    """[L, D], device loads if replicas share a step's loads [L, E] evenly."""
    layer = np.arange(len(loads))[:, None]
    counts = np.zeros(loads.shape)
    np.add.at(counts, (layer, placement.slots), 1.0)
    per_slot = loads[layer, placement.slots] / counts[layer, placement.slots]
    return per_slot.reshape(len(loads), placement.num_devices, -1).sum(2)


def num_moved(before: Placement, after: Placement) -> int:
    """Copies that devices must receive to get from one placement to the other."""

    def held(placement: Placement) -> np.ndarray:
        counts = np.zeros((len(placement.slots), placement.num_devices, placement.num_experts), int)
        layer = np.arange(len(placement.slots))[:, None]
        np.add.at(counts, (layer, placement.device_of_slot, placement.slots), 1)
        return counts

    return int(np.maximum(held(after) - held(before), 0).sum())
