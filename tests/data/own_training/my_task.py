import torch
import bssearch


class MyTask:
    metrics = {"accuracy": bssearch.MetricInfo(low=0, high=1, chance=0.5)}

    def load(self, device):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(3000, 20, generator=generator).to(device)
        targets = (inputs[:, :10].sum(1) > inputs[:, 10:].sum(1)).long()
        part = lambda a, b: bssearch.Part(inputs[a:b], targets[a:b])
        return bssearch.Data(train=part(0, 2000), validation=part(2000, 2500), test=part(2500, 3000))

    def build_model(self, *, dropout):
        return torch.nn.Sequential(
            torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 2)
        )

    def loss(self, model, inputs, targets, *, label_smoothing):
        return torch.nn.functional.cross_entropy(model(inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model, part):
        return {"accuracy": (model(part.inputs).argmax(1) == part.targets).float().mean().item()}
