"""What a real run takes on this machine, in bytes and seconds, and which way of it is the fastest."""
