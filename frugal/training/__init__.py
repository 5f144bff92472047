"""The real thing: models, data and the engine that runs a plan. torch and DeepSpeed live here."""
