# train.py
import argparse
import json
import time

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--learning-rate", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--evaluate-every", type=int, default=100)
options = parser.parse_args()

inputs = torch.randn(1200, 10, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()
torch.manual_seed(options.seed)
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate)


def accuracy():
    with torch.no_grad():
        return (model(inputs[1000:]).argmax(1) == targets[1000:]).float().mean().item()


seconds = 0.0
for step in range(options.steps + 1):
    if step % options.evaluate_every == 0:
        print(json.dumps({"step": step, "accuracy": accuracy(), "seconds": seconds}))
    began = time.perf_counter()
    rows = torch.randint(1000, (options.batch_size,))
    loss = torch.nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    seconds += time.perf_counter() - began
