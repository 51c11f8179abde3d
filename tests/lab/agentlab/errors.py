# SPDX-License-Identifier: GPL-2.0-or-later
"""The one exception of the lab."""


class LabError(Exception):
    """The lab could not do what was asked; the text says why and what to do."""
