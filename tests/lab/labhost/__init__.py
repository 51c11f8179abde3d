# SPDX-License-Identifier: GPL-2.0-or-later
"""A Docker host and an "internet" for tests, in namespaces of their own. See tests/lab/README.md."""
