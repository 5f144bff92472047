"""Data that is read and tokenised while training, in an order that a checkpoint can go on with."""
