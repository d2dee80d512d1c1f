"""Lightning callbacks, one a file."""
