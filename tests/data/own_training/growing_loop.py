import bssearch
import torch
from torch.utils.data import DataLoader, TensorDataset

trial = bssearch.current_trial(batch_size=32, learning_rate=0.1)
inputs = torch.randn(1200, 10, generator=torch.Generator().manual_seed(0))
targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()
train = TensorDataset(inputs[:1000], targets[:1000])

model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate)
trial.state(model=model, optimizer=optimizer)


def evaluate():
    with torch.no_grad():
        return {"accuracy": (model(inputs[1000:]).argmax(1) == targets[1000:]).float().mean().item()}


def loader(size):
    return DataLoader(train, batch_size=size, shuffle=True, drop_last=True)


micro_batches = 0
for x, y in trial.batches(loader, evaluate=evaluate, epochs=5):
    loss = torch.nn.functional.cross_entropy(model(x), y) / trial.accumulation_steps
    loss.backward()
    micro_batches += 1
    if micro_batches == trial.accumulation_steps:
        for group in optimizer.param_groups:
            group["lr"] = trial.learning_rate
        optimizer.step()
        optimizer.zero_grad()
        micro_batches = 0
