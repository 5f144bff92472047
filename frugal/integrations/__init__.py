"""Plans in other people's trainers: transformers' Trainer, and what derives from it, such as TRL's SFTTrainer."""
