"""Executors for worker processes, Ray, this process, programs and users' loops."""
