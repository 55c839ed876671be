# SPDX-License-Identifier: Apache-2.0
"""
The corpus of faults: small PyTorch programs, each with one mistake, and zerod's expected diagnostic.

    scenarios/  the programs, each with its expectation as data and its repaired twin
    corpus      the parts of an expectation, and the registry of scenarios
    trial       the interface of a program: attach, data, rank, whether this run is faulty
    plain       the same in torch alone: the single-process reference, and the count of hooks
    trainer     a trainer process: runs a program as one rank and records the messages that it gets
    house       the daemon and the processes of one run
    judge       compares the diagnostics and the status with the expectation
    runner      runs scenarios, a few at a time, and makes the table
"""
