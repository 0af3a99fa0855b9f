"""Tests of other packages, with factorlayer in the place of their products, and of their models, converted; each is
skipped where its package is not installed: `pip install "factorlayer[foreign]"`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
