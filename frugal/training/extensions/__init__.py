"""What a user adds to a run: a metric of his own, when it is at its best and over, callbacks."""
