"""Executors run trials: worker processes, Ray, this process, scripts, commands and users' loops."""
