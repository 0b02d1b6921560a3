# my_text.py
import random

import torch
from torch import nn
from torch.nn import functional

import bssearch

TOKENS = 200  # YOURS: the size of the vocabulary; token 0 is padding


class Classifier(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 32, padding_idx=0)
        self.head = nn.Sequential(nn.Dropout(dropout), nn.Linear(32, 2))

    def forward(self, ids, mask):
        mean = self.embedding(ids).sum(1) / mask.sum(1, keepdim=True)
        return self.head(mean)


class MyText:
    metrics = {"accuracy": bssearch.MetricInfo(low=0, high=1, chance=0.5)}

    def load(self, device):
        rng = random.Random(0)  # YOURS: for each text what the tokeniser says, and its label
        texts = [[rng.randrange(1, TOKENS) for _ in range(rng.randint(5, 40))] for _ in range(3000)]
        samples = [(ids, int(sum(ids) > 100 * len(ids))) for ids in texts]
        return bssearch.Data(train=samples[:2000], validation=samples[2000:2500], test=samples[2500:])

    def collate(self, samples):
        longest = max(len(ids) for ids, _ in samples)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in samples])
        return {"ids": ids, "mask": ids != 0}, torch.tensor([label for _, label in samples])

    def build_model(self, *, dropout):
        return Classifier(dropout)

    def build_optimizer(self, model, configuration):
        rate, decay = configuration.learning_rate, configuration.weight_decay
        groups = [
            {"params": model.embedding.parameters(), "lr": rate, "weight_decay": 0.0},
            {"params": model.head.parameters(), "lr": rate / 2, "weight_decay": decay},
        ]
        return torch.optim.AdamW(groups)

    def loss(self, model, inputs, targets, *, label_smoothing):
        return functional.cross_entropy(model(**inputs), targets, label_smoothing=label_smoothing)

    def evaluate(self, model, part):
        correct = sum((model(**inputs).argmax(1) == targets).sum().item() for inputs, targets in part.chunks(256))
        return {"accuracy": correct / len(part)}
