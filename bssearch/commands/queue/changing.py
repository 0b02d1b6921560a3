"""``cancel``, ``pause`` and ``resume``: what a person makes of a submission; its workers see it within seconds."""

from __future__ import annotations

from contextlib import suppress

from bssearch.errors import CheckpointError
from bssearch.pruners.checkpoints import Checkpoints
from bssearch.queue.submission import Submission, SubmissionState
from bssearch.records import TrialState
from bssearch.settings import user_name
from bssearch.storage.repository import Store


def cancel_study(store: Store, study: str) -> Submission:
    """Cancel a submission: what runs of it is stopped, what waits of it does not go on.

    Raises `NotFoundError` where nobody submitted it, `UsageError` where it is done.
    """
    found = store.set_submission(study, SubmissionState.CANCELLED, f"cancelled by {user_name()}")
    if not any(worker.is_here and worker.serving == study for worker in store.workers()):
        settle_cancelled(store, study)  # Else those that serve it do, once what runs has ended.
    return found


def pause_study(store: Store, study: str) -> Submission:
    """Pause a submission: what runs of it is saved and waits. Raises `NotFoundError`, `UsageError` where it is over."""
    return store.set_submission(study, SubmissionState.PAUSED, f"paused by {user_name()}")


def resume_study(store: Store, study: str) -> Submission:
    """Have a submission wait again that is not done; raises `NotFoundError`, and `UsageError` where it is done."""
    return store.set_submission(study, SubmissionState.WAITING, "")


def settle_cancelled(store: Store, study: str) -> None:
    """End the trials of a cancelled study that wait, and forget what is saved of them here."""
    record = store.find_study(study)
    if record is not None:
        store.settle_paused(study, state=TrialState.CANCELLED)
        with suppress(CheckpointError):  # what a store elsewhere does not delete now is of no use to anybody
            Checkpoints(record).clear()
