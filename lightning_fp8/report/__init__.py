"""What people look at: the report of a run, its pictures, and what a checkpoint tells."""
