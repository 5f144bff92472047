"""The real run: the engine, its loop, and what happens when memory runs out. torch lives here."""
