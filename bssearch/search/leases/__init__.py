"""Which driver a trial or a phase of a study belongs to, and how others see that it is gone."""
