import torch
from torch import nn

import bssearch

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(900, 10, generator=generator)
targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()


def train(trial):
    hidden = trial.parameters["hidden"]
    model = nn.Sequential(nn.Linear(10, hidden), nn.ReLU(), nn.Linear(hidden, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.learning_rate, momentum=0.9)
    trial.state(model=model, optimizer=optimizer)

    def accuracy():
        with torch.no_grad():
            return {"accuracy": (model(inputs[700:]).argmax(1) == targets[700:]).float().mean().item()}

    rows = torch.utils.data.DataLoader(range(700), batch_size=trial.micro_batch_size, shuffle=True, drop_last=True)
    for batch in trial.batches(rows, evaluate=accuracy):
        loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


spec = {
    "name": "my-function",
    "target": {"metric": "accuracy", "value": 0.9},
    "space": {
        "batch_size": [16, 32, 64],
        "learning_rate": {"low": 0.02, "high": 0.5},
        "model": {"hidden": [4, 16]},
    },
    "default": {"batch_size": 32, "learning_rate": 0.1, "model": {"hidden": 4}},
    "confirm": {"top": 1, "runs": 2},
    "budget": {"trials": 6, "trial_train_seconds": 2},
    "executor": {"device": "cpu"},
}
answer = bssearch.Study(spec, objective=train).run()
print(answer.optimal.batch_size, answer.optimal.parameters)
