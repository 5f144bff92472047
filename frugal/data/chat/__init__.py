"""Rows for supervised fine-tuning: what they are, the template of chats, and which tokens are trained on."""
