"""What the Python package and the compiled extension have to agree on: the version, and what they call of each other.

An extension stays behind when its source is updated and not built again, as an editable install allows. layer_ops.py
asks here before it uses one.
"""

from __future__ import annotations

from types import ModuleType

VERSION = "0.1.0"
INTERFACE = 16  # of what the extension and the package call of each other: csrc/python.h has the same number


def check_build(extension: ModuleType) -> None:
    """Raises ImportError if the extension was built from another source than the package beside it."""
    version = getattr(extension, "version", "before 0.1.0")
    if version != VERSION:
        raise ImportError(f"it was built from factorlayer {version}, and this is {VERSION}")
    interface = getattr(extension, "interface", 0)
    if interface != INTERFACE:
        raise ImportError(
            f"it was built from another source of factorlayer {VERSION}: its interface is {interface}, "
            f"this one's {INTERFACE}"
        )
