import bssearch
import lightning
import torch
from bssearch.executors.loops.lightning import TrialCallback
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("accuracy", (self.model(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 5))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


trial = bssearch.current_trial(batch_size=32, learning_rate=0.1)
inputs = torch.randn(1200, 10, generator=torch.Generator().manual_seed(0))
data = TensorDataset(inputs, (inputs[:, :5].sum(1) > inputs[:, 5:].sum(1)).long())
train, validation = torch.utils.data.Subset(data, range(1000)), torch.utils.data.Subset(data, range(1000, 1200))

train_loader = DataLoader(train, batch_size=trial.micro_batch_size, shuffle=True)
settings = dict(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer = lightning.Trainer(max_epochs=4, callbacks=[TrialCallback(trial)], **settings)
trainer.fit(Module(), train_loader, DataLoader(validation, batch_size=200))
print(f"accuracy {trainer.callback_metrics['accuracy']:.4f}")
