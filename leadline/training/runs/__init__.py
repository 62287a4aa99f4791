"""Many training runs: several at a time, each stored as soon as it ends, none made twice."""
