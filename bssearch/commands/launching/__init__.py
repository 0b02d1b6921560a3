"""What a study is opened with: the code that it runs, and what was decided for it before."""
