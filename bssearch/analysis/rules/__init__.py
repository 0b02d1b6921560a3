"""Rules of thumb, judged by a study's measurements."""
