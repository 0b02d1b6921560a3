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


def train_step(x, y):
    loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


loader = DataLoader(train, batch_size=trial.micro_batch_size, shuffle=True, drop_last=True)
for x, y in trial.batches(loader, evaluate=evaluate, epochs=5):
    train_step(x, y)
