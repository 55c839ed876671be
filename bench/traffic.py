# SPDX-License-Identifier: Apache-2.0
"""
Computes the bytes that a step must move on one node, with fp32 weights and with fp32 gradients that are pushed by copy.
Compares the step with a bare stream of as many bytes.

For each element: every rank reads its gradient and writes it into its slot; the daemon reads each rank's slot and
writes the sum; the update reads weight, sum and two moments and writes all but the sum. Clipping and the search for
non-finite values read no further bytes.
"""

import json

from harness import MI, Failure, Process, ZerodJob, in_turn, median, n_cores, program, row

FP32 = 4
ELEMS = 64 * MI
STREAM_READS, STREAM_WRITES = 4 * FP32, 3 * FP32  # bytes per element that bench-stream reads and writes in a pass
GOAL = 0.92


def read_and_written(world):
    """Return: the bytes that a step reads and writes per element."""
    return (FP32 * (world + world + 4), FP32 * (world + 1 + 3))


def step_bytes(elems, world):
    return elems * sum(read_and_written(world))


def passes(world):
    """Return: how many passes of the stream read and write as many bytes as a step."""
    reads, writes = read_and_written(world)
    if reads % STREAM_READS or reads // STREAM_READS != writes / STREAM_WRITES:
        raise Failure(f"a step of {world} ranks reads and writes in another proportion than the stream")
    return reads // STREAM_READS


def traffic(quick):
    """The bytes that a whole step must move, compared with a bare stream of as many bytes; 64 Mi fp32 parameters, 2
    ranks."""
    world, jobs = 2, []
    try:
        job = ZerodJob(world, 2, ELEMS)
        jobs.append(job)
        stream = Process([program("bench-stream"), "--elems", str(ELEMS), "--threads", str(n_cores()), "--passes",
                          str(passes(world))])
        jobs.append(stream)
        stream.receive()

        def run_stream():
            stream.send()
            return json.loads(stream.receive())

        results = in_turn({"zerod": job.step, "stream": run_stream}, 5 if quick else 21)
    finally:
        for j in jobs:
            j.stop()
    n_bytes = step_bytes(ELEMS, world)
    if any(r["bytes"] != n_bytes for r in results["stream"]):
        raise Failure(f"the stream moved {results['stream'][0]['bytes']} bytes instead of {n_bytes}")
    mine, streamed = median([r["total"] for r in results["zerod"]]), median([r["ns"] / 1e6 for r in results["stream"]])
    reads, writes = (n * ELEMS / MI for n in read_and_written(world))
    table = [["", "MiB read", "MiB written", "ms", "GB/s"]]
    table += [[name, f"{reads:.0f}", f"{writes:.0f}", f"{ms:.1f}", f"{n_bytes / ms / 1e6:.1f}"]
              for name, ms in (("zerod, a step of 2 ranks", mine), ("stream", streamed))]
    return [row("traffic: bytes of the step over time, 2 ranks", mine, streamed,
                "a stream of the same bytes, same pages", "ms", GOAL)], {"the bytes": table}
