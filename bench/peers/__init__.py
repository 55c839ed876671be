# SPDX-License-Identifier: Apache-2.0
"""Chains of peers that do the work of a step of zerod, by family. They run in the processes of torch_rank.py."""

import importlib

FIFTEEN, FIFTEEN_CLIP = "fifteen lines", "fifteen lines, clip and check"
SHM, SHM_CLIP = "DeepSpeed shm all-reduce + fused AdamW", "DeepSpeed shm all-reduce + clip + fused AdamW"
SHM_OWN_ADAM = "DeepSpeed shm all-reduce + clip + DeepSpeedCPUAdam"

# family -> (module, name of its list of chains). Imported on demand, because DeepSpeed takes seconds and compiles.
FAMILIES = {"alone": ("peers.gloo", "ALONE"), "gloo": ("peers.gloo", "GLOO"), "fifteen": ("peers.fifteen", "CHAINS"),
            "deepspeed": ("peers.deepspeed_shm", "CHAINS")}


def make_chains(family, rank):
    module, kinds = FAMILIES[family]
    return [kind(rank) for kind in getattr(importlib.import_module(module), kinds)]
