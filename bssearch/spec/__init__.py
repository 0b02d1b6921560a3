"""A study's spec: its model and its reader."""

from bssearch.spec.model import StudySpec
from bssearch.spec.reader import checked, find_spec, load_spec

__all__ = ["StudySpec", "checked", "find_spec", "load_spec"]
