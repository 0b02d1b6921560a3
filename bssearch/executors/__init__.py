"""Executors: worker processes, Ray, this process, programs and users' loops."""
