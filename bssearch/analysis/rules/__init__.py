"""Rules of thumb, judged by what a study measured."""
