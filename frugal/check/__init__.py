"""Configurations of other trainers: what batch they come to, whether they fit, and what is wrong with them."""
