# SPDX-License-Identifier: Apache-2.0
"""Functions of torch and of other libraries that zerod wraps, where they have no hook for it."""
