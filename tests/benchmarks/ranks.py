"""CPU time of adding gradients over ranks, compared with PyTorch's DistributedDataParallel; and the time to notice a
death.

    python tests/benchmarks/ranks.py [--batch-size 512] [--ranks 2] [--turns 60] [--kills 5]

Processes on gloo, with one thread each, train the same perceptron in turns of ten steps: through DDP, and with the
hooks of `bssearch.training.ranks`. The ratio is of CPU seconds per step of rank 0, over all its threads, because other
processes lengthen wall time. The bar is 1.05.

Then SIGKILL hits the last rank of ``kills`` trials. The bar is 1 s from the signal to the trial's end.
"""

if not __package__:
    __import__("from_clone")

import os
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from bssearch.training.ranks import Ranks
from tests.benchmarks.harness import ratio, script, turned, verdict
from tests.executors.line_workload import opened, outcomes, request_endless_trial, wait_for
from tests.executors.test_local import on_ranks, ranks_of

BAR = 1.05
NOTICED_SECONDS = 1.0
STEPS = 10  # per turn
WIDTHS = (784, 512, 256, 10)  # 0.5 million parameters


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = [[nn.Linear(*pair), nn.ReLU()] for pair in pairwise(WIDTHS)]
    return nn.Sequential(*[layer for pair in layers for layer in pair][:-1])


def steps_of(
    model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], begin: Callable[[], None], end: Callable[[], None]
) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def steps() -> None:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[0]), batch[1])
            begin()
            loss.backward()  # type: ignore[no-untyped-call]
            end()
            optimizer.step()

    return steps


def work(rank: int, size: int, batch_size: int, turns: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # as the ranks of a worker connect
    ranks = Ranks(rank, size, torch.device("cpu"), folder=Path(folder), seconds=300.0)
    store = distributed.FileStore(f"{folder}/ddp", size)  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    torch.manual_seed(rank)
    share = batch_size // size
    batch = torch.randn(share, WIDTHS[0]), torch.randint(WIDTHS[-1], (share,))
    hooked = perceptron()
    gradients = ranks.gradient_sum(hooked)
    runs = {
        "ddp": steps_of(DistributedDataParallel(perceptron()), batch, lambda: None, lambda: None),
        "hooks": steps_of(hooked, batch, gradients.begin, gradients.end),
    }
    found: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(turns + 2):
        for name in turned(list(runs), turn):
            distributed.barrier()
            entered = time.process_time()
            runs[name]()
            if turn >= 2:
                found[name].append((time.process_time() - entered) / STEPS)
    distributed.destroy_process_group()
    if rank == 0:
        torch.save(found, f"{folder}/found")


def seconds_until_noticed(size: int, kills: int) -> list[float]:
    found = []
    with tempfile.TemporaryDirectory() as folder, opened(Path(folder)) as executor:
        for number in range(1, kills + 1):
            executor.submit(on_ranks(request_endless_trial(number), size))
            wait_for(executor, lambda events: len(events) >= 3)
            killed = time.perf_counter()
            ranks_of(executor)[-1].kill()
            wait_for(executor, outcomes)
            found.append(time.perf_counter() - killed)
    return found


def main(batch_size: int = 512, ranks: int = 2, turns: int = 60, kills: int = 5) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (ranks, batch_size, turns, folder), nprocs=ranks)  # type: ignore[no-untyped-call]
        found = torch.load(f"{folder}/found")
    for name, seconds in found.items():
        print(f"{name}: {1e3 * sorted(seconds)[len(seconds) // 2]:.2f} ms of CPU a step, median of {turns} turns")
    middle, low, high = ratio(found["hooks"], found["ddp"])
    print(f"hooks over DDP: {middle:.3f} [{low:.3f}, {high:.3f}]; bar {BAR}")
    noticed = seconds_until_noticed(ranks, kills)
    print(f"a killed rank was noticed after {', '.join(f'{one:.2f}' for one in noticed)} s; bar {NOTICED_SECONDS}")
    return verdict(middle <= BAR and max(noticed, default=0.0) <= NOTICED_SECONDS)


if __name__ == "__main__":
    script(main, __doc__)
