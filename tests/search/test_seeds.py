from __future__ import annotations

from bssearch.records import Phase
from bssearch.search.history import trial_seed


def test_seeds_differ_by_study_phase_and_index_and_use_all_of_31_bits() -> None:
    seeds = {trial_seed(study, phase, index) for study in (0, 1) for phase in Phase for index in range(1000)}
    assert len(seeds) == 2 * len(Phase) * 1000
    assert 2**30 < max(seeds) < 2**31
    assert trial_seed(0, Phase.SEARCH, 0) == trial_seed(0, Phase.SEARCH, 0)
