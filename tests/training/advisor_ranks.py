"""One rank of a training that an advisor follows: ``python advisor_ranks.py RANK RANKS FILE``.

Prints the moments of steps averaged by DistributedDataParallel, and the reason why other steps were not measured.
"""

import itertools
import json
import os
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bssearch
from bssearch.records.noise_scale import moments
from tests.training.test_advisor import BATCH, accumulated, at_zero, samples


def main(rank: int, ranks: int, file: str) -> None:
    """Train without a step of the optimizer, so that the gradients of each batch are known."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=ranks)
    found = []
    for is_averaged in (True, False):
        model, ticks = at_zero(), itertools.count()
        ranked = DistributedDataParallel(model) if is_averaged else model
        advisor = bssearch.BatchAdvisor(model, BATCH, now=partial(next, ticks))
        for _, (x, y) in zip(range(40), samples(5), strict=False):
            accumulated(advisor, ranked, torch.chunk(x, ranks)[rank], torch.chunk(y, ranks)[rank])
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            advisor.step()
            model.zero_grad()
        found.append(advisor)
    if rank == 0:
        passes = [(samples, *moments(one, one.plain)) for samples, one in found[0]._passes]
        print(json.dumps([passes, found[1].report().reason]))
    sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # threads of gloo may abort or hang at the end of the interpreter


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
