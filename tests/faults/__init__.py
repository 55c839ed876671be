# SPDX-License-Identifier: Apache-2.0
"""
The corpus of faults: small PyTorch programs, each with one mistake, and what zerod must say of it.

    scenarios/  the programs, each with its expectation as data and its repaired twin
    corpus      what an expectation is made of, and where scenarios register
    trial       what a program is given: attach, data, rank, whether it is the faulty one
    plain       the same in torch alone: the single-process reference, and the count of hooks
    trainer     a trainer process: runs a program as one rank and writes down what it was told
    house       a daemon of its own and the processes of one run
    judge       what was expected against what was said, and found in the status
    runner      all of it a few at a time, and the table
"""
