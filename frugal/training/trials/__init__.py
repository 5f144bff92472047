"""What a model does, seen by running a small one of its kind before there is a plan."""
