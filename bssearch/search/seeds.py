"""Seeds of trials, derived from the study's: the same study gives the same seeds, and no two phases share one."""

from __future__ import annotations

import hashlib

from bssearch.records import Phase


def trial_seed(study_seed: int, phase: Phase, index: int) -> int:
    """Return a 31-bit seed for the trial with this index in its phase."""
    digest = hashlib.sha256(f"{study_seed}/{phase}/{index}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1
