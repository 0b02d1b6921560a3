"""What is asked of all studies that match, in one database or several."""
