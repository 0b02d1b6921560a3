"""A watch over made-up curves, without a store: for tests of what chooses and prunes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bssearch.pruners.checkpoints import Checkpoints
from bssearch.pruners.controller import Watch
from bssearch.records import Observation, StudyRecord
from bssearch.spec import StudySpec
from tests.factories import EPOCH


def study_record(spec: StudySpec) -> StudyRecord:
    return StudyRecord(
        name=spec.name,
        spec={},
        spec_hash=spec.question_hash,
        objective=spec.objective,
        target=spec.record_target,
        created_by="test",
        created_at=EPOCH,
        environment=None,
    )


def make_watch(spec: StudySpec, observations: Mapping[int, Sequence[Observation]]) -> Watch:
    """Return a watch to which the store's curves are ``observations``; a trial without any has none."""
    checkpoints = Checkpoints(study_record(spec))
    return Watch(spec, lambda number: observations.get(number, ()), checkpoints)
