# SPDX-License-Identifier: GPL-2.0-or-later
"""Real Docker hosts in namespaces, for tests (tests/lab/README.md).

Python's standard library alone. Everything is made inside namespaces of the lab's own; the
machine's network namespace, /etc, /run and services stay as they are.
"""

from .errors import LabError
from .host import ENGINES, Host
from .internet import Internet
from .lab import Lab
from .sniff import Frame, Sniffer

__all__ = ["ENGINES", "Frame", "Host", "Internet", "Lab", "LabError", "Sniffer"]
