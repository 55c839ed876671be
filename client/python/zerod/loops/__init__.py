# SPDX-License-Identifier: Apache-2.0
"""Training loops that continue where the job is: a program's own (steps.py), and those of other libraries."""
