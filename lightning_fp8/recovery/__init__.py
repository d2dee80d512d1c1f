"""Recovery from bad steps: verdict, skip, snapshot, ladder, events. On tensors and optimizers, without a Trainer."""
