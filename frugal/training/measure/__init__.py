"""What a real run takes on this machine, in bytes and seconds."""
