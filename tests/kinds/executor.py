"""An example of one executor, as a package of your own may have it."""

from pathlib import Path

from bssearch.executors.slots import LocalExecutor
from bssearch.records import TrialRequest


class Noted(LocalExecutor):
    """Worker processes of this machine, and a line in `trials.txt` for each trial."""

    def submit(self, request: TrialRequest) -> None:
        with Path("trials.txt").open("a") as file:
            file.write(f"{request.number}\n")
        super().submit(request)
