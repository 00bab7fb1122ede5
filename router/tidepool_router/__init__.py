# SPDX-License-Identifier: Apache-2.0
"""Routing conversations so that each stays on the node that holds its KV cache."""
