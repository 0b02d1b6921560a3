import os

import bssearch
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

if "RANK" in os.environ:
    distributed.init_process_group("gloo")  # "nccl" on GPUs
trial = bssearch.current_trial(batch_size=32, learning_rate=0.1)
inputs = torch.randn(1200, 10, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()
train = TensorDataset(inputs[:1000], targets[:1000])

model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
if trial.world_size > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
trial.state(model=model, optimizer=optimizer)


def evaluate():
    with torch.no_grad():
        return {"accuracy": (model(inputs[1000:]).argmax(1) == targets[1000:]).float().mean().item()}


loader = DataLoader(train, batch_size=trial.micro_batch_size, sampler=trial.sampler(train))
for number, (x, y) in enumerate(trial.batches(loader, evaluate=evaluate, epochs=5), start=1):
    with trial.no_sync(model):
        loss = torch.nn.functional.cross_entropy(model(x), y) / trial.accumulation_steps
        loss.backward()
    if number % trial.accumulation_steps == 0:
        optimizer.step()
        optimizer.zero_grad()
if trial.world_size > 1:
    distributed.destroy_process_group()
