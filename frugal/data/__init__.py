"""From documents to the micro-batches of a rank."""
