import optuna
import bssearch


def train(batch_size, learning_rate):
    """Yield train seconds and accuracy; this stands for your training."""
    steps = 300 * (1 + 64 / batch_size) * (1 + (learning_rate - 0.1) ** 2)
    for percent in range(0, 101, 10):
        yield percent / 100 * steps * (0.002 + 1e-5 * batch_size), 0.0097 * percent


def objective(trial):
    batch_size = trial.suggest_int("batch_size", 8, 512, log=True)
    learning_rate = trial.suggest_float("learning_rate", 1e-3, 1.0, log=True)
    for seconds, accuracy in train(batch_size, learning_rate):
        trial.report(accuracy, step=round(1000 * seconds))
        if accuracy >= 0.97:
            return seconds
        if seconds > 12:
            break
    raise optuna.TrialPruned


sampler = bssearch.TimeToTargetSampler(0.97, default={"batch_size": 64, "learning_rate": 0.1}, seed=0)
study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.NopPruner())
study.optimize(objective, n_trials=20)
