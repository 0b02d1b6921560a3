import bssearch
import torch
from bssearch.executors.loops.transformers import TrialCallback, training_arguments
from torch.nn.utils.rnn import pad_sequence
from transformers import BertConfig, BertForSequenceClassification, Trainer

trial = bssearch.current_trial(batch_size=32, learning_rate=3e-3, evaluate_every=50)
generator = torch.Generator().manual_seed(0)
lengths = torch.randint(5, 12, (1500,), generator=generator).tolist()
tokens = [torch.randint(1, 100, (length,), generator=generator) for length in lengths]
texts = [{"input_ids": row, "labels": int(row[0] > 50)} for row in tokens]

config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
model = BertForSequenceClassification(config)
model.accepts_loss_kwargs = False  # its loss is a mean, see below


def collate(rows):
    ids = pad_sequence([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": ids > 0, "labels": torch.tensor([row["labels"] for row in rows])}


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


settings = dict(output_dir="out", per_device_eval_batch_size=250)
args = training_arguments(trial, **settings)
trainer = Trainer(
    model=model,
    args=args,
    data_collator=collate,
    train_dataset=texts[:1000],
    eval_dataset=texts[1000:],
    compute_metrics=accuracy,
    callbacks=[TrialCallback(trial)],
)
trainer.train()
