"""A study's spec: the model, the search space and templates of submissions."""

from bssearch.spec.model import StudySpec
from bssearch.spec.reader import checked, find_spec, load_spec

__all__ = ["StudySpec", "checked", "find_spec", "load_spec"]
