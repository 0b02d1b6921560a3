"""Step times of a simulated node with several GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from bssearch.errors import LaunchError
from bssearch.records import StepTime, StepTimeRequest
from bssearch.search.calibration import COMPARING_VISITS, measure_step_times
from bssearch.storage.repository import Store, open_store
from tests.factories import make_environment, make_spec, not_none
from tests.search.law import LawExecutor
from tests.search.study import url_in

SPEC, HERE = make_spec(), make_environment(device_type="cuda")
SIZES = [*SPEC.batch_sizes]


@dataclass
class Node(LawExecutor):
    """A node; its devices' step times are multiplied by ``paces``, and by ``together`` if all work at once."""

    slots: int = 3
    slots_apart: bool = True
    paces: tuple[float, ...] = (1.0, 1.0, 1.0)
    together: float = 1.0
    contended: bool = False
    waves: list[list[int]] = field(default_factory=list)

    def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
        self.waves.append([one.configuration.batch_size for one in requests])
        return [super(Node, self).measure_step_time(one) for one in requests]

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        found = super().measure_step_time(request)
        return {
            f"GPU-{index}": replace(
                found, step_seconds=not_none(found.step_seconds) * pace * self.together, contended=self.contended
            )
            for index, pace in enumerate(self.paces)
        }


class OneDeviceFails(Node):
    """A node with a broken device."""

    def step_times_by_device(self, request: StepTimeRequest) -> dict[str, StepTime]:
        raise LaunchError("the worker of slot 2 died")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(url_in(tmp_path)) as opened:
        opened.studies.create(SPEC.new_study("me"))
        yield opened


def measured(store: Store, executor: LawExecutor) -> list[str]:
    """Time steps; return the messages."""
    told: list[str] = []
    measure_step_times(SPEC, store, executor, HERE, lambda: None, 3, trials=[], tell=told.append)
    visits = [(one.visit, one.batch_size) for one in store.probes.visits(SPEC.name)]
    assert sorted(visits) == [(visit, size) for visit in (1, 2, 3) for size in SIZES]
    return told


def test_devices_that_agree_share_the_visits_after_the_first(store: Store) -> None:
    executor = Node()
    assert measured(store, executor) == []
    assert executor.waves == [SIZES[:3], SIZES[3:]] * 2, "as many at once as there are devices"


@pytest.mark.parametrize(
    ("executor", "words"),
    [
        (Node(paces=(1.0, 1.0, 1.2)), ["a step on GPU-2 takes 1.2 times"]),
        (Node(paces=(1.0, 0.9, 1.0)), ["a step on GPU-1 takes 0.9 times"]),
        (Node(together=1.3), ["with all at work a step takes 1.3 times"]),
        (Node(contended=True), []),
        (Node(slots_apart=False), []),
        (LawExecutor(slots=3, slots_apart=True), []),
    ],
    ids=["slow", "fast", "in each other's way", "contended", "shared devices", "an executor that cannot"],
)
def test_where_devices_do_not_agree_one_makes_all_visits(executor: LawExecutor, words: list[str], store: Store) -> None:
    told = measured(store, executor)
    assert len(told) == len(words) and all(word in sentence for word, sentence in zip(words, told, strict=True))
    assert not isinstance(executor, Node) or executor.waves == []


def test_a_size_that_runs_out_of_memory_on_another_device_is_timed_in_smaller_micro_batches(store: Store) -> None:
    @dataclass
    class Shrinks(Node):
        def measure_step_times(self, requests: Sequence[StepTimeRequest]) -> list[StepTime]:
            self.fits_up_to = SIZES[-1] - 1
            return super().measure_step_times(requests)

    measure_step_times(SPEC, store, Shrinks(), HERE, lambda: None, COMPARING_VISITS, trials=[])
    found = store.probes.by_batch_size(SPEC.name, HERE)
    assert found[SIZES[-1]].micro_batch_size < SIZES[-1]
    assert set(found) == set(SIZES)


def test_where_another_device_times_nothing_one_device_times_all(store: Store) -> None:
    node = OneDeviceFails()
    assert measured(store, node) == [
        "step times are measured on one device, because another failed: the worker of slot 2 died"
    ]
    assert node.waves == []
