"""A worker process that a Ray actor owns, as the driver sees it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from bssearch.executors.driven_worker import Inbox
from bssearch.executors.failures import Death
from bssearch.executors.messages import Command, decode_reply, encode
from bssearch.executors.ray.actor import Heard, Place
from bssearch.executors.ray.cluster import said_by
from bssearch.records import TrialState

HEAR_SECONDS = 1.0
"""How long an actor may wait for something to say, before it answers that there is nothing: a choice."""

SILENCE_SECONDS = 60.0
"""An actor that has not answered for so long is lost: a choice. A dead process or machine shows within seconds as a
broken connection; this is for a network that swallows all."""


class ActorWorker:
    """A worker in an actor, as a `bssearch.executors.driven_worker.Worker`. ``machine`` is the name of the actor's.

    Two threads: one passes on what the driver says, in its order; one asks the actor again and again what the worker
    has said. An actor that dies, or is silent for `SILENCE_SECONDS`, is the death of the worker: lost.
    """

    def __init__(
        self,
        ray: Any,
        actor: Any,
        *,
        slot: int,
        threads: int,
        log: Path,
        inbox: Inbox,
        environment: Mapping[str, str],
        place: Place,
    ) -> None:
        self.slot = slot
        self.log = log
        self.log_start = log.stat().st_size if log.exists() else 0
        log.touch()
        self.last_heard = time.monotonic()
        self.place, self.machine = place.node, place.machine
        self.pid = 0
        self._ray, self._actor = ray, actor
        self._inbox = inbox
        self._death: Death | None = None
        self._asked: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._start = partial(actor.start.remote, slot, threads, dict(environment))
        self._listener = threading.Thread(target=self._listen, name=f"bssearch slot {slot}", daemon=True)
        self._talker = threading.Thread(target=self._talk, name=f"bssearch slot {slot} (commands)", daemon=True)
        self._listener.start()

    @property
    def is_lost(self) -> bool:
        """Whether the actor is gone, and not only its worker."""
        return self._death is not None and self._death.verdict is not None

    def send(self, command: Command) -> None:
        """Send a command; one to a dead worker is lost, its death is told through the inbox."""
        self._asked.put(partial(self._actor.tell.remote, encode(command)))

    def has_exited(self) -> bool:
        """Return whether the process is known to have ended."""
        return self._death is not None

    def write_stack(self) -> None:
        """Have the worker write to its log where its main thread stands."""
        self._asked.put(self._actor.write_stack.remote)

    def kill(self) -> None:
        """Kill the worker and all that it started; its end is told through the inbox. A signal handler may call it."""
        self._asked.put(self._actor.kill.remote)

    def bury(self) -> Death:
        """Let go of a worker whose end was told; return how it died."""
        self._asked.put(None)
        self._listener.join()
        assert self._death is not None, "its end has been told"
        return self._death

    def _talk(self) -> None:
        """Pass on what the driver says: the next thing once the last one has arrived."""
        while (ask := self._asked.get()) is not None:
            with suppress(self._ray.exceptions.RayError):  # the listener finds out
                self._ray.get(ask(), timeout=SILENCE_SECONDS)

    def _listen(self) -> None:
        """Put each reply into the inbox, and a None once the worker is dead or lost."""
        try:
            self.pid = self._ray.get(self._start(), timeout=SILENCE_SECONDS)
            self._talker.start()
            while self._death is None:
                heard: Heard = self._ray.get(
                    self._actor.hear.remote(HEAR_SECONDS), timeout=HEAR_SECONDS + SILENCE_SECONDS
                )
                self._take(heard)
        except self._ray.exceptions.GetTimeoutError:  # which is an OSError, too
            self._end(TrialState.LOST, f"{self.machine} has not answered for {SILENCE_SECONDS:g} s")
        except self._ray.exceptions.RayTaskError as error:  # this may be any error that the actor has raised
            self._end(TrialState.FAILED, f"the worker cannot be served on {self.machine}: {said_by(error)}")
        except self._ray.exceptions.RayError as error:
            self._end(TrialState.LOST, f"lost with its Ray actor on {self.machine}: {said_by(error)}")
        except OSError as error:
            self._end(TrialState.FAILED, f"the log {self.log} cannot be written: {error.strerror}")
        except ValueError as error:
            self._end(TrialState.FAILED, f"what came from {self.machine} is no reply: {error}")
        finally:
            self._inbox.put((self, None))

    def _take(self, heard: Heard) -> None:
        if heard.log:
            with self.log.open("ab") as log:
                log.write(heard.log)
        if heard.replies:
            self.last_heard = time.monotonic()
        for line in heard.replies:
            self._inbox.put((self, decode_reply(line)))
        self._death = heard.death

    def _end(self, state: TrialState, reason: str) -> None:
        """Note a death that is not the worker's own, and end the actor, which may live on."""
        self._death = Death(0, verdict=(state, reason))
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor, no_restart=True)
