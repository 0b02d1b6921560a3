"""``cancel``, ``pause`` and ``resume``: what a person makes of a submission; its workers see it within seconds."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from bssearch.errors import CheckpointError
from bssearch.pruners.checkpoints import Checkpoints
from bssearch.queue.submission import Submission, SubmissionState
from bssearch.records import TrialState
from bssearch.search.leases.owner import is_alive
from bssearch.settings import user_name
from bssearch.storage.repository import Store


def cancel_study(store: Store, study: str) -> Submission:
    """Cancel a submission: what runs of it is stopped, what waits of it does not go on.

    Raises `NotFoundError` where nobody submitted it, `UsageError` where it is done.
    """
    found = store.set_submission(study, SubmissionState.CANCELLED, f"cancelled by {user_name()}")
    if study not in _served(store):
        settle_cancelled(store, study)  # Else those that serve it do, once what runs has ended.
    return found


def pause_study(store: Store, study: str) -> Submission:
    """Pause a submission: what runs of it is saved and waits. Raises `NotFoundError`, `UsageError` where it is over."""
    return store.set_submission(study, SubmissionState.PAUSED, f"paused by {user_name()}")


def resume_study(store: Store, study: str) -> Submission:
    """Have a submission wait again that is not done; raises `NotFoundError`, and `UsageError` where it is done."""
    return store.set_submission(study, SubmissionState.WAITING, "")


def settle_cancelled(store: Store, study: str) -> None:
    """End the trials of a cancelled study that wait, or whose driver is gone; forget what is saved of them here."""
    record = store.find_study(study)
    if record is not None:
        store.mark_lost(study, is_alive=is_alive)
        store.settle_paused(study, state=TrialState.CANCELLED)
        with suppress(CheckpointError):  # what a store elsewhere does not delete now is of no use to anybody
            Checkpoints(record).clear()


def settle_left_behind(store: Store) -> dict[str, str]:
    """Settle the cancelled studies that a worker which was killed has left; none that any driver is at work on.

    Returns of which that failed, and why.
    """
    problems: dict[str, str] = {}
    left = store.unsettled()
    for study in {*left} - _served(store) if left else ():
        try:
            _settle_left_behind(store, study, left[study])
        except Exception as error:  # what somebody has written there, or deleted now, concerns no other study
            problems[study] = f"{type(error).__name__}: {error}"
    return problems


def _settle_left_behind(store: Store, study: str, numbers: Collection[int]) -> None:
    """End some trials of a study, those that wait and those whose driver is gone; forget what is saved of them here."""
    store.mark_lost(study, is_alive=is_alive)
    time = store.time()
    if any(until > time and is_alive(owner) is not False for owner, until in store.leases(study).items()):
        return
    checkpoints = Checkpoints(store.study(study))
    store.settle_paused(study, numbers, TrialState.CANCELLED)
    for number in checkpoints.present() & {*numbers}:
        checkpoints.forget(number)
    checkpoints.close()


def _served(store: Store) -> set[str]:
    """Return the studies that workers serve now."""
    return {worker.serving for worker in store.workers() if worker.is_here and worker.serving is not None}
