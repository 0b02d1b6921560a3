"""The page of a study and its plots."""
