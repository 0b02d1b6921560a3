"""Read runs with the boards' own libraries, without their warnings."""

import json
import warnings
from pathlib import Path
from typing import Any

from bssearch.exchange.importers.logs import wandb_records


def event_files(folder: Path) -> Any:
    """A whole run of TensorBoard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        run = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
        run.Reload()
        return run


def hyperparameters(run: Any) -> dict[str, Any]:
    """Values of a run in TensorBoard's table of hyperparameters."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    content = run.PluginTagToContent("hparams")["_hparams_/session_start_info"]
    found = HParamsPluginData.FromString(content).session_start_info.hparams
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in found.items()}


def texts(run: Any) -> dict[str, str]:
    return {tag: run.Tensors(tag)[-1].tensor_proto.string_val[0].decode() for tag in run.Tags()["tensors"]}


def mlflow_client(folder: Path) -> Any:
    """MLflow's client for the store in a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from mlflow import MlflowClient

        return MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")


def mlflow_runs(folder: Path, study: str, kind: str = "trial") -> list[Any]:
    """A study's runs in MLflow."""
    client = mlflow_client(folder)
    experiment = client.get_experiment_by_name(f"bssearch/{study}")
    runs: list[Any] = client.search_runs([experiment.experiment_id], f"tags.`bssearch.kind` = '{kind}'")
    return sorted(runs, key=lambda run: int(run.data.tags.get("bssearch.trial", 0)))


def wandb_run(folder: Path, suffix: str) -> dict[str, Any]:
    """Configuration, history and summary of an offline run of W&B.

    A resumed run has another file, which W&B merges when it syncs.
    """
    files = sorted(folder.glob(f"wandb/offline-run-*-{suffix}/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert files
    found: dict[str, Any] = {"config": {}, "history": [], "summary": {}}
    for record in (record for file in files for record in wandb_records(file)):
        if record.HasField("run"):
            found["group"], found["id"] = record.run.run_group, record.run.run_id
            found["config"] |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
        elif record.HasField("history"):
            row = {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
            found["history"].append(row)
        elif record.HasField("summary"):
            updates = {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.summary.update}
            found["summary"] |= updates
    return found
