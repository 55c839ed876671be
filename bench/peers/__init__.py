# SPDX-License-Identifier: Apache-2.0
"""Chains of others that do what a step of zerod does, by family. Runs in the processes of torch_rank.py."""

FIFTEEN, FIFTEEN_CLIP = "fifteen lines", "fifteen lines, clip and check"
SHM, SHM_CLIP = "DeepSpeed shm all-reduce + fused AdamW", "DeepSpeed shm all-reduce + clip + fused AdamW"
SHM_OWN_ADAM = "DeepSpeed shm all-reduce + clip + DeepSpeedCPUAdam"


def make_chains(family, rank):
    """The chains of one family. Imported when asked for: DeepSpeed takes seconds, and compiles."""
    if family == "alone":
        from peers.gloo import ALONE as kinds
    elif family == "gloo":
        from peers.gloo import GLOO as kinds
    elif family == "fifteen":
        from peers.fifteen import CHAINS as kinds
    elif family == "deepspeed":
        from peers.deepspeed_shm import CHAINS as kinds
    return [kind(rank) for kind in kinds]
