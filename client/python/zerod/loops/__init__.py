# SPDX-License-Identifier: Apache-2.0
"""Training loops that continue at the job's step: a program's own (steps.py), and those of other libraries."""
