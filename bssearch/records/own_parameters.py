"""Hyperparameters of the user's own, as a configuration holds them: under ``model.NAME`` and ``loss.NAME``."""

from __future__ import annotations

from collections.abc import Mapping

from bssearch.records.question import Configuration, ParameterValue

OWN_GROUPS = ("model", "loss")
"""What they are handed to: a workload's ``build_model`` or its ``loss``."""

ModelParameters = tuple[tuple[str, ParameterValue], ...]
"""What a model is built with, as (name, value) by name: configurations that differ in it take other steps."""


def own_parameters(configuration: Configuration) -> dict[str, ParameterValue]:
    """Return the user's own parameters of a configuration by their bare names: ``{"hidden": 64, "alpha": 0.5}``.

    No name stands in both groups.
    """
    both = (parameters_of_group(configuration.parameters, group) for group in OWN_GROUPS)
    return {name: value for own in both for name, value in own.items()}


def parameters_of_group(parameters: Mapping[str, ParameterValue], group: str) -> dict[str, ParameterValue]:
    """Return those of a configuration's parameters that are ``model``'s, or ``loss``'s, by their bare names."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): value for name, value in parameters.items() if name.startswith(prefix)}


def model_parameters(configuration: Configuration) -> ModelParameters:
    """Return the own parameters that a configuration's model is built with; empty where there are none."""
    return tuple(sorted(parameters_of_group(configuration.parameters, OWN_GROUPS[0]).items()))
