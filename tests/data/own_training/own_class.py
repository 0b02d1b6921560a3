import torch

import bssearch


class MyTask:
    metrics = {"accuracy": bssearch.MetricInfo(low=0, high=1, chance=0.5)}

    def __init__(self, hidden=8):
        self.hidden = hidden

    def load(self, device):
        inputs = torch.randn(900, 10, generator=torch.Generator().manual_seed(0))
        targets = (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long()
        train, validation, test = (
            bssearch.Part(inputs[low:high], targets[low:high]) for low, high in ((0, 500), (500, 700), (700, 900))
        )
        return bssearch.Data(train=train, validation=validation, test=test)

    def build_model(self, *, dropout):
        return torch.nn.Sequential(torch.nn.Linear(10, self.hidden), torch.nn.ReLU(), torch.nn.Linear(self.hidden, 2))

    def loss(self, model, inputs, targets, *, label_smoothing):
        return torch.nn.functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model, part):
        return {"accuracy": (model(part.inputs).argmax(1) == part.targets).float().mean().item()}


spec = bssearch.load_spec(
    {
        "name": "my-task",
        "target": {"metric": "accuracy", "value": 0.9},
        "space": {"batch_size": [16, 32, 64], "learning_rate": [0.05, 0.1, 0.2]},
        "default": {"batch_size": 32, "learning_rate": 0.1},
        "confirm": {"top": 1, "runs": 2},
        "budget": {"trials": 6, "trial_train_seconds": 2},
        "executor": {"device": "cpu"},
    }
)

if __name__ == "__main__":
    answer = bssearch.run_study(spec, bssearch.Launch(workload=MyTask))
    print(answer.optimal.batch_size, answer.optimal.parameters["learning_rate"])
    print(answer.frame[["batch_size", "reached", "time_to_target_s.median"]])
