"""An example of one probe, as a package of your own may have it."""

from typing import Annotated

from bssearch import Launch, StudySpec
from bssearch.commands.opening import described
from bssearch.commands.probes import ProbeReport
from bssearch.registry import Option


def samples(spec: StudySpec, launch: Launch, *, times: Annotated[int, Option("A factor.", min=1)] = 1) -> ProbeReport:
    with described(spec, launch) as (_, found):
        row = {"samples": times * (found.train_samples or 0)}
    return ProbeReport(document=row, rows=[row], sentences=[f"There are {row['samples']} samples."])
