"""The folder of a training run: whose it is, its checkpoints, its state and its logs."""
